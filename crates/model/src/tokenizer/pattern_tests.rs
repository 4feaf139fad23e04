use super::{Pattern, translate};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TEXTS: [&str; 9] = [
    "",
    " ",
    "  two  blanks",
    "ends in blanks   ",
    "lines\r\n\r\n  and\n\n",
    "don't THEY'LL 12345",
    "\u{3000}\u{3000}x\u{a0}\u{a0}",
    "世界 \u{1f980}\u{200d}\u{1f9e1}!?\n\t\tx",
    "\t\n\t\n a",
];

#[test]
fn the_way_in_linear_time_gives_what_stepping_back_gives() {
    for source in [GPT2, CL100K, r"\s?\p{P}+", r"\d", "a|ab"] {
        let fast = Pattern::new(source).unwrap();
        let engine = Pattern::backtracking(&translate(source).unwrap()).unwrap();
        let slow = Pattern { source: source.to_owned(), engine };
        assert!(!matches!(fast.engine, super::Engine::Backtracking(_)));
        for text in TEXTS {
            assert_eq!(fast.find_all(text).unwrap(), slow.find_all(text).unwrap(), "{source} in {text:?}");
        }
    }
}

#[test]
fn long_runs_of_blanks_are_matched_to_their_end() {
    let blanks = " ".repeat(3_000_000);
    let found = Pattern::new(GPT2).unwrap().find_all(&format!("{blanks}x{blanks}")).unwrap();
    let lengths: Vec<usize> = found.iter().map(|span| span.len()).collect();
    assert_eq!(lengths, [2_999_999, 2, 3_000_000]);
}

#[test]
fn empty_matches_cut_and_do_not_repeat() {
    let pattern = Pattern::new(r"(?=(\d{3})+(?!\d))").unwrap();
    let spans: Vec<(usize, usize)> =
        pattern.find_all("1234567").unwrap().iter().map(|span| (span.start, span.end)).collect();
    assert_eq!(spans, [(1, 1), (4, 4)]);
}

#[test]
fn what_forbids_stepping_back_is_not_taken_for_a_repetition() {
    let spans = |source: &str, text: &str| -> Vec<(usize, usize)> {
        Pattern::new(source).unwrap().find_all(text).unwrap().iter().map(|span| (span.start, span.end)).collect()
    };
    assert_eq!(spans(r"[^\p{L}]?+\p{L}+|[^\p{L}]", ", a"), [(0, 1), (1, 3)]);
    assert_eq!(spans(r"a++b|[+*]+", "aab+*+"), [(0, 3), (3, 6)]);
    assert_eq!(spans(r"\p{N}{1,2}+", "12345"), [(0, 5)]);
}

#[test]
fn an_expression_that_is_none_is_refused() {
    assert!(Pattern::new("(").unwrap_err().contains("\"(\""));
}
