//! Runs the programs in `examples/` and checks their output.

use std::path::Path;

use crate::program::{Workplace, stdout};

#[path = "../../../../examples/generate.rs"]
mod generate;
#[path = "../../../../examples/layer_in_a_loop.rs"]
mod layer_in_a_loop;
#[path = "../../../../examples/many_sequences.rs"]
mod many_sequences;
#[path = "../../../../examples/on_ranks.rs"]
mod on_ranks;
#[path = "../../../../examples/own_expert.rs"]
mod own_expert;
#[path = "../../../../examples/own_router.rs"]
mod own_router;

#[test]
fn the_layer_in_a_loop_learns() {
    let (before, after) = layer_in_a_loop::train(401).unwrap();
    assert!(after < 0.6 * before, "{before} before, {after} after");
}

#[test]
fn tokens_go_to_the_experts_of_the_own_router() {
    let (chosen, found) = own_router::route().unwrap();
    assert_eq!(found, chosen);
    assert!(chosen.len() == 64 && chosen.contains(&7), "{chosen:?}");
}

#[test]
fn the_output_of_own_experts_is_their_weighted_sum() {
    let own_expert::Outcome { x, y, choices } = own_expert::forward().unwrap();
    for ((x, y), choices) in x.chunks(6).zip(y.chunks(6)).zip(&choices) {
        for (i, &y) in y.iter().enumerate() {
            let sum: f32 =
                choices.iter().map(|&(expert, weight)| weight * own_expert::EXPERTS[expert as usize](x)[i]).sum();
            assert!((y - sum).abs() < 1e-5, "{y}, not {sum}");
        }
    }
}

#[test]
fn a_checkpoint_continues_a_text() {
    let file = "../model/tests/fixtures/gguf/olmoe.gguf";
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let work = Workplace::new();
    let args = ["--prompt", "Hello", "--max-tokens", "24", "--temperature", "0"];
    let printed = work.run(&[&["generate", model.to_str().unwrap()][..], &args].concat());
    let text = generate::complete(&model, "Hello").unwrap();
    assert_eq!(stdout(&printed).trim_end(), format!("Hello{text}").trim_end());
}

#[test]
fn experts_on_ranks_give_the_output_of_one_rank() {
    let [on_ranks, on_one] = on_ranks::outputs().unwrap();
    assert_eq!(on_ranks.len(), on_one.len());
    assert!(on_ranks.iter().zip(&on_one).all(|(a, b)| (a - b).abs() < 1e-5));
}

#[test]
fn sequences_in_one_pass_are_continued_as_they_are_alone() {
    let prompts = [vec![1, 2, 3], (10..40).collect(), vec![99]];
    let together = many_sequences::complete(&prompts).unwrap();
    for (prompt, together) in prompts.iter().zip(together) {
        assert_eq!(many_sequences::complete(std::slice::from_ref(prompt)).unwrap(), [together]);
    }
}

#[test]
fn the_page_of_the_examples_shows_lines_of_theirs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/using-the-library.md")).unwrap();
    let lines = |text: &str| text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>();
    let mut sections = page.split("\n## ").skip(1).peekable();
    assert!(sections.peek().is_some());
    for section in sections {
        let name = section.split("(../examples/").nth(1).and_then(|rest| rest.split(')').next());
        let name = name.unwrap_or_else(|| panic!("no example in the section {section:?}"));
        let example = lines(&std::fs::read_to_string(root.join("examples").join(name)).unwrap());
        let shown = section.split("```rust\n").nth(1).and_then(|rest| rest.split("\n```").next()).unwrap();
        let shown = lines(shown);
        assert!(example.windows(shown.len()).any(|part| part == shown), "{name} has no such lines: {shown:#?}");
    }
}
