//! Patterns of weight names, in which `*` matches any run of characters.

/// Returns the edit distance from `name` to the nearest text that `pattern` matches; 0 if it matches.
fn distance(pattern: &str, name: &str) -> usize {
    let mut row: Vec<usize> = (0..=name.len()).collect();
    for byte in pattern.bytes() {
        let mut diagonal = row[0];
        if byte == b'*' {
            // Any run of the name is skipped at no cost.
            (1..row.len()).for_each(|j| row[j] = row[j].min(row[j - 1]));
            continue;
        }
        row[0] += 1;
        for (j, other) in name.bytes().enumerate() {
            let replaced = diagonal + usize::from(byte != other);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[name.len()]
}

/// Returns true if `pattern` matches all of `name`.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    distance(pattern, name) == 0
}

/// Returns the three names nearest to `pattern`, with `*` for layer numbers.
pub(super) fn nearest<'a>(pattern: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut near: Vec<(usize, String)> = Vec::new();
    for name in names {
        let (cost, general) = (distance(pattern, name), without_numbers(name));
        match near.iter_mut().find(|(_, known)| *known == general) {
            Some(known) => known.0 = known.0.min(cost),
            None => near.push((cost, general)),
        }
    }
    near.sort_by_key(|(cost, _)| *cost);
    near.into_iter().take(3).map(|(_, name)| name).collect()
}

/// Returns the name with `*` for the number of its layer.
pub(super) fn without_numbers(name: &str) -> String {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_run_of_characters() {
        let name = "model.layers.11.self_attn.q_proj.weight";
        for pattern in ["*", name, "*.q_proj.weight", "model.*", "model.layers.*.self_attn.*", "*layers.11*weight"] {
            assert!(matches(pattern, name), "{pattern}");
        }
        for pattern in ["", "q_proj", "*.q_proj", "model.layers.1.*", "*.k_proj.weight", "model.layers.11.mlp.*"] {
            assert!(!matches(pattern, name), "{pattern}");
        }
    }

    #[test]
    fn the_nearest_names_come_first_and_once_for_all_layers() {
        let names = ["model.norm.weight", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"];
        let near = nearest("*.down_prj", names.into_iter());
        assert_eq!(near, ["model.layers.*.mlp.down_proj", "model.norm.weight"]);
    }
}
