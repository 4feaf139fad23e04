//! Forms by the texts that they have and have not, and by answers drawn at random. Tests of a row of the catalogue of
//! bad input have its number in their names.

use std::sync::Arc;

use moeworks_infer::constraint::{Constraint, ConstraintError, Form, Vocabulary};
use moeworks_model::{TokenBytes, TokenTable, Tokenizer};
use proptest::prelude::*;
use serde_json::Value;

fn schema(text: &str) -> Form {
    Form::json_schema_text(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Checks the texts that a form has, and those that it has not.
fn check(form: &Form, right: &[&str], wrong: &[&str]) {
    for text in right {
        assert!(form.matches(text).unwrap(), "{text:?} has the form");
    }
    for text in wrong {
        assert!(!form.matches(text).unwrap(), "{text:?} has not the form");
    }
}

#[test]
fn regular_expressions_match_whole_texts_in_bytes() {
    check(&Form::regex("[a-c]{2,3}x?").unwrap(), &["ab", "abcx"], &["a", "abcd", "xab", ""]);
    check(&Form::regex("^(?:é|\\d+)$").unwrap(), &["é", "42", "٣"], &["e", "é4"]);
    check(&Form::regex("(a*)*b").unwrap(), &["b", "aaab"], &["a"]);
    check(&Form::regex(".").unwrap(), &["x", "日", "🙂"], &["\n", "xx"]);
}

#[test]
fn objects_have_their_keys_in_order_and_optional_ones_may_be_left_out() {
    let form = schema(
        r#"{"type":"object","properties":{"z":{"type":"integer"},"a":{"type":"boolean"},"m":{"type":"null"}},"required":["a"]}"#,
    );
    check(
        &form,
        &[r#"{"z":1,"a":true,"m":null}"#, r#"{"a":false}"#, r#"{"z": -5, "a": true}"#, "{\n  \"a\": true\n}"],
        &[r#"{"z":1}"#, r#"{"a":true,"z":1}"#, r#"{"a":true,}"#, r#"{"a":true,"b":1}"#, "{}", r#"{"z":01,"a":true}"#],
    );
}

#[test]
fn additional_properties_have_other_names() {
    let form =
        schema(r#"{"properties":{"ab":{"const":1}},"required":["ab"],"additionalProperties":{"type":"integer"}}"#);
    check(
        &form,
        &[r#"{"ab":1}"#, r#"{"ab":1,"a":2,"abc":3,"é":4,"":5}"#],
        &[r#"{"ab":1,"ab":2}"#, r#"{"ab":1,"a":"x"}"#, r#"{"a":1}"#, r#"{"ab":1,"a\u0062":3}"#],
    );
}

#[test]
fn lists_have_bounds_and_first_items() {
    check(
        &schema(r#"{"items":{"type":"integer"},"minItems":2,"maxItems":3}"#),
        &["[1,2]", "[1, 2, 3]"],
        &["[1]", "[1,2,3,4]"],
    );
    check(&schema(r#"{"type":"array","maxItems":0}"#), &["[]"], &["[1]"]);
    let pair = r#"{"prefixItems":[{"type":"integer"},{"type":"string"}],"minItems":2,"items":false}"#;
    check(&schema(pair), &[r#"[1,"a"]"#], &["[1]", r#"[1,"a",2]"#, r#"["a",1]"#]);
    check(
        &schema(r#"{"prefixItems":[{"type":"integer"}],"items":{"const":"x"}}"#),
        &["[]", "[1]", r#"[1,"x","x"]"#],
        &[r#"["x"]"#],
    );
}

#[test]
fn strings_have_lengths_patterns_and_formats() {
    check(
        &schema(r#"{"type":"string","minLength":1,"maxLength":2}"#),
        &[r#""é""#, r#""\n\u00e9""#, r#""🙂🙂""#],
        &[r#""""#, r#""abc""#],
    );
    check(&schema(r#"{"pattern":"^[a\"]+$"}"#), &[r#""a""#, r#""a\"""#], &[r#""""#, r#""a"""#, r#""b""#]);
    check(&schema(r#"{"pattern":"b"}"#), &[r#""abc""#, r#""b""#], &[r#""ac""#]);
    check(&schema(r#"{"format":"date"}"#), &[r#""2024-01-31""#], &[r#""2024-02-30""#, r#""2024-1-1""#]);
    check(&schema(r#"{"type":"string","format":"uri"}"#), &[r#""anything""#], &["5"]);
    check(&schema(r#"{"type":"string"}"#), &[r#""\ud83d\ude00""#], &[r#""\ud83d""#, "\"\n\""]);
}

#[test]
fn alternatives_constants_and_references_are_followed() {
    check(&schema(r#"{"enum":["a",1,null,{"b":[2]}]}"#), &[r#""a""#, "1", "null", r#"{"b":[2]}"#], &["a", "2"]);
    check(&schema(r#"{"anyOf":[{"type":"integer"},{"type":"string"}],"title":"x"}"#), &["1", r#""x""#], &["true"]);
    let tree = r##"{"$defs":{"node":{"type":"object","properties":{"v":{"type":"integer"},"next":{"anyOf":[{"$ref":"#/$defs/node"},
        {"type":"null"}]}},"required":["v","next"]}},"$ref":"#/$defs/node"}"##;
    check(&schema(tree), &[r#"{"v":1,"next":{"v":2,"next":null}}"#], &[r#"{"v":1}"#, r#"{"v":1,"next":{}}"#]);
    let all = r##"{"allOf":[{"properties":{"a":{"type":"integer"}},"required":["a"]},{"$ref":"#/$defs/b"}],
        "$defs":{"b":{"properties":{"b":{"type":"null"}},"required":["b"]}}}"##;
    check(&schema(all), &[r#"{"a":1,"b":null}"#], &[r#"{"a":1}"#]);
    check(&schema(r#"{"type":["integer","null"],"minimum":3}"#), &["3", "null"], &["2"]);
}

#[test]
fn any_object_is_json() {
    let form = Form::json_object().unwrap();
    check(
        &form,
        &["{}", r#"{"a": [1, -2.5e3, "x\n", {"b": null}], "é": true}"#],
        &["[]", "{", r#"{"a":1,}"#, r#"{"a":.5}"#, r#"{"a":1}x"#, r#"{a:1}"#],
    );
}

#[test]
fn grammars_have_rules_sets_groups_and_counts() {
    let text = "root ::= greeting (\", \" name){1,2} [!?]? # comment\ngreeting ::= \"Hi\" | \"Hello\"\n  | \"H\\u00e9\"\nname ::= [A-Z] [^A-Z,!?]*\n";
    check(&Form::grammar(text).unwrap(), &["Hi, Ada!", "Hello, B, C", "Hé, D日"], &["Hi", "Hi, ada", "Hi, A, B, C"]);
    let nested = "root ::= \"(\" root* \")\"";
    check(&Form::grammar(nested).unwrap(), &["()", "(()(()))"], &["(", "())"]);
    for (text, reason) in [
        ("", "no rule root"),
        ("root ::= other", "other is used and not there"),
        ("root ::= (\"a\"", ") is missing"),
        ("root = x", "::="),
        ("root ::= \"a", "does not end"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= \"a\"{5,2}", "numbers up to"),
        ("root ::= \"a\"\nroot ::= \"b\"", "comes twice"),
        ("root ::= root \"a\" | \"b\"", "begins with itself"),
        ("root ::= \"a\" root", "never end"),
    ] {
        let error = Form::grammar(text).unwrap_err().to_string();
        assert!(error.contains(reason) && !error.contains('\n'), "{text:?}: {error}");
    }
}

#[test]
fn h4_bad_schemas_are_refused_in_one_line() {
    let refs = r##"{"$ref":"#"}"##;
    let both = r##"{"anyOf":[{"$ref":"#"},{"type":"null"}]}"##;
    let endless = r##"{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}"##;
    for (text, reason) in [
        ("5", "must be an object"),
        (r#"{"type":"wat"}"#, "type must be"),
        (r#"{"type":5}"#, "type must be"),
        (r#"{"pattern":"(a"}"#, "pattern"),
        (r#"{"pattern":"(?=a)b"}"#, "look-around"),
        (r#"{"pattern":"(a)\\1"}"#, "backreferences"),
        (r#"{"pattern":"a{1,100000}{1,1000}"}"#, "too large"),
        (r#"{"properties":{"a":{"not":{}}}}"#, "#/properties/a: not is not supported"),
        (r#"{"type":"array","uniqueItems":true}"#, "uniqueItems"),
        (r#"{"minLength":3,"maxLength":2}"#, "maxLength"),
        (r#"{"minItems":99999999}"#, "minItems"),
        (r#"{"minimum":"x"}"#, "minimum"),
        (r#"{"$ref":"http://example.com"}"#, "not fetched"),
        (r##"{"$ref":"#/$defs/none"}"##, "nothing there"),
        (r#"{"enum":[]}"#, "enum"),
        (r#"{"anyOf":[]}"#, "list of schemas"),
        (r#"{"type":"integer","minimum":5,"maximum":3}"#, "never end"),
        (refs, "never end"),
        (both, "begins with itself"),
        (endless, "never end"),
        ("{", "not JSON"),
    ] {
        let error = Form::json_schema_text(text).unwrap_err().to_string();
        assert!(error.contains(reason) && !error.contains('\n'), "{text}: {error}");
    }
    let deep = format!("{}{}", r#"{"items":"#.repeat(5000), "}".repeat(5000));
    assert!(Form::json_schema_text(&deep).is_err());
    // References that double with each level.
    let mut defs = String::new();
    for level in 0..40 {
        defs += &format!(
            r##""d{level}":{{"allOf":[{{"anyOf":[{{"$ref":"#/$defs/d{0}"}},{{"$ref":"#/$defs/d{0}"}}],"x":1}},{{"y":1}}]}},"##,
            level + 1
        );
    }
    let bomb = format!(r##"{{"$defs":{{{defs}"d40":{{"type":"null"}}}},"$ref":"#/$defs/d0"}}"##);
    let _ = Form::json_schema_text(&bomb).map(|form| check(&form, &["null"], &[]));
}

#[test]
fn h5_nested_and_huge_grammars_are_refused() {
    let nested = format!("root ::= {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000));
    assert!(Form::grammar(&nested).unwrap_err().to_string().contains("inside of each other"));
    assert!(Form::grammar(&"x".repeat(1 << 20)).is_err());
    assert_eq!(Form::grammar("root ::= ((\"a\"{9999}){9999}){9999}").unwrap_err(), ConstraintError::TooLarge);
    let nested = format!("{}a{}", "(".repeat(30_000), ")".repeat(30_000));
    assert!(Form::regex(&nested).is_err());
    assert!(Form::choice(&[]).is_err() && Form::choice(&vec!["a".to_owned(); 2000]).is_err());
}

#[test]
fn h6_an_ambiguous_expression_does_not_backtrack() {
    let form = Form::regex("(a|a|aa)*(a|a)*b").unwrap();
    let text = "a".repeat(10_000);
    assert!(!form.matches(&text).unwrap() && form.matches(&(text + "b")).unwrap());
}

/// A vocabulary in which characters are cut and several signs are one token.
fn odd_tokens() -> TokenTable {
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.extend(
        [&b"{\""[..], b"\":", b"\", \"", b"}}", b"true", b": {", b"\"}", b"[[", b"\xc3", b"\xa9\"", b"12"]
            .map(<[u8]>::to_vec),
    );
    let tokens = tokens.into_iter().map(|bytes| TokenBytes { bytes: bytes.into(), is_special: false });
    tokens.chain([TokenBytes { bytes: b"<end>"[..].into(), is_special: true }]).collect()
}

/// Draws an answer at random, token by token; none if it does not end.
fn drawn(form: &Form, table: &TokenTable, mut seed: u64, most: usize) -> Option<String> {
    let end = table.len() as u32 - 1;
    let mut constraint = Constraint::new(form.clone(), Arc::new(Vocabulary::new(table))).unwrap();
    let mut bytes = Vec::new();
    for count in 0..most {
        if constraint.is_complete() {
            return Some(String::from_utf8(bytes).unwrap());
        }
        let mut logits = vec![0.0; table.len()];
        constraint.apply(&mut logits, &[end]).unwrap();
        let possible: Vec<u32> = (0..table.len() as u32).filter(|&id| logits[id as usize] == 0.0).collect();
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Towards the end, what closes something.
        let closing = possible.iter().copied().find(|&id| id == end || matches!(table.bytes(id), b"\"" | b"}" | b"]"));
        let any = possible[(seed >> 33) as usize % possible.len()];
        let id = if count > 40 { closing.unwrap_or(any) } else { any };
        if id == end {
            return Some(String::from_utf8(bytes).unwrap());
        }
        constraint.push(id).unwrap();
        bytes.extend_from_slice(table.bytes(id));
    }
    None
}

#[test]
fn answers_drawn_at_random_have_their_form() {
    let table = odd_tokens();
    let forms = [
        schema(
            r#"{"properties":{"name":{"type":"string","maxLength":9},"n":{"type":"integer","minimum":-3,"maximum":120},"tags":{"items":{"enum":["é","b"]},"maxItems":3}},"required":["name","n"]}"#,
        ),
        Form::json_object().unwrap(),
        schema(r#"{"type":"array","items":{"type":"number"},"maxItems":4}"#),
    ];
    let mut num_ended = 0;
    for form in &forms {
        for seed in 0..60 {
            if let Some(text) = drawn(form, &table, seed, 400) {
                num_ended += 1;
                let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
                if let Some(n) = value.get("n").and_then(Value::as_i64).filter(|_| value.get("name").is_some()) {
                    assert!((-3..=120).contains(&n), "{text}");
                }
                assert!(form.matches(&text).unwrap(), "{text}");
            }
        }
    }
    assert!(num_ended > 120, "{num_ended} of 180 ended");
}

#[test]
fn a_token_that_cannot_come_is_impossible_and_an_answer_may_end_only_where_its_form_does() {
    let table = Tokenizer::bytes().token_table();
    let vocabulary = Arc::new(Vocabulary::new(&table));
    let mut constraint = Constraint::new(Form::regex("ab?").unwrap(), vocabulary).unwrap();
    let allowed = |constraint: &mut Constraint| {
        let mut logits = vec![1.0; 257];
        constraint.apply(&mut logits, &[256]).unwrap();
        (0..257).filter(|&id| logits[id as usize] == 1.0).collect::<Vec<u32>>()
    };
    assert_eq!(allowed(&mut constraint), [u32::from(b'a')]);
    constraint.push(u32::from(b'a')).unwrap();
    assert_eq!(allowed(&mut constraint), [u32::from(b'b'), 256]);
    assert!(!constraint.is_complete());
    constraint.push(u32::from(b'b')).unwrap();
    assert!(constraint.is_complete());
}

#[test]
fn what_the_automaton_forgets_is_made_again() {
    // Each digit is a state of its own, with masks for a large vocabulary.
    let table: TokenTable = (0..200_000_u32)
        .map(|id| TokenBytes { bytes: format!("{id}").into_bytes().into(), is_special: false })
        .collect();
    let form = Form::regex("[0-9]{3000}").unwrap();
    let mut constraint = Constraint::new(form, Arc::new(Vocabulary::new(&table))).unwrap();
    for _ in 0..1500 {
        let mut logits = vec![0.0; table.len()];
        constraint.apply(&mut logits, &[]).unwrap();
        assert_eq!((logits[7], logits[77]), (0.0, 0.0));
        constraint.push(77).unwrap();
    }
    assert!(constraint.is_complete());
}

proptest! {
    #[test]
    fn whole_numbers_are_those_within_their_bounds(a in -2000_i64..2000, b in -2000_i64..2000, x in -2100_i64..2100) {
        let (least, most) = (a.min(b), a.max(b));
        let form = schema(&format!(r#"{{"type":"integer","minimum":{least},"exclusiveMaximum":{}}}"#, most + 1));
        prop_assert_eq!(form.matches(&x.to_string()).unwrap(), (least..=most).contains(&x));
    }

    #[test]
    fn numbers_are_those_within_their_bounds(a in -30_i64..30, b in -30_i64..30, x in -310_i64..310) {
        let (least, most) = (a.min(b), a.max(b) + 1);
        let form = schema(&format!(r#"{{"type":"number","exclusiveMinimum":{least},"maximum":{most}}}"#));
        let (number, text) = (x as f64 / 10.0, format!("{:.1}", x as f64 / 10.0));
        prop_assume!(text != "-0.0");
        prop_assert_eq!(form.matches(&text).unwrap(), number > least as f64 && number <= most as f64, "{}", text);
    }

    #[test]
    fn no_text_makes_a_reader_panic(text in ".{0,60}", pattern in "[a-z(){}\\[\\]*+?|^$.\\\\0-9-]{0,20}") {
        let _ = Form::json_schema_text(&text);
        let _ = Form::regex(&pattern);
        let _ = Form::grammar(&text);
        let _ = Form::grammar(&format!("root ::= {pattern}"));
    }
}
