use std::fs;

use proptest::prelude::*;

use super::super::input::with_input;
use super::*;

/// Returns the pieces of a file with this content.
fn pieces(content: &[u8]) -> Result<Vec<(String, bool)>, DataError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.txt");
    fs::write(&path, content).unwrap();
    let mut pieces = Vec::new();
    let (flow, _) = with_input(&path, "text", |input| {
        read(input, &mut |piece| {
            pieces.push((piece.text.to_string(), piece.ends_document));
            Ok(ControlFlow::Continue(()))
        })
    });
    flow.map(|_| pieces)
}

/// Returns text of more than two pieces whose multibyte characters cross every possible border.
fn long_text(word: &str, shift: usize) -> String {
    let mut text = "x".repeat(shift);
    while text.len() < 2 * PIECE_BYTES + 1000 {
        text.push_str(word);
    }
    text
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn the_pieces_of_a_large_document_are_its_text(shift in 0usize..8, word in "[a-zé€😀 \n]{1,9}") {
        let text = long_text(&word, shift);
        let pieces = pieces(text.as_bytes()).unwrap();
        prop_assert_eq!(pieces.iter().map(|(text, _)| text.as_str()).collect::<String>(), text);
        prop_assert!(pieces.iter().all(|(text, _)| !text.is_empty() && text.len() <= PIECE_BYTES));
        let ends: Vec<bool> = pieces.iter().map(|&(_, ends)| ends).collect();
        prop_assert_eq!(ends.iter().filter(|&&ends| ends).count(), 1);
        prop_assert_eq!(ends.last(), Some(&true));
    }
}

#[test]
fn pieces_are_cut_between_words() {
    let pieces = pieces(long_text("some words\nand lines ", 3).as_bytes()).unwrap();
    for pair in pieces.windows(2) {
        assert!(pair[0].0.ends_with(|c: char| c.is_ascii_alphabetic()) && pair[1].0.starts_with(' '));
    }
}

#[test]
fn the_mark_of_byte_order_goes_and_line_ends_stay() {
    assert_eq!(pieces(b"\xef\xbb\xbfa\r\nb").unwrap(), [("a\r\nb".to_string(), true)]);
    assert_eq!(pieces(b"\xef\xbb\xbf").unwrap(), []);
    assert_eq!(pieces(b"").unwrap(), []);
}

#[test]
fn a_wrong_byte_is_found_wherever_it_stands() {
    for at in [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 17] {
        let mut content = long_text("words ", 0).into_bytes();
        content[at] = 0xff;
        assert!(matches!(pieces(&content), Err(DataError::NotUtf8 { offset, .. }) if offset == at as u64), "{at}");
    }
    let mut cut = b"\xef\xbb\xbfab".to_vec();
    cut.extend_from_slice(&"€".as_bytes()[..2]);
    assert!(matches!(pieces(&cut), Err(DataError::NotUtf8 { offset: 5, .. })));
}

#[test]
fn an_early_nul_is_binary_and_a_late_one_is_text() {
    assert!(matches!(pieces(b"ab\0cd"), Err(DataError::Binary { offset: 2, .. })));
    let mut late = vec![b'a'; BINARY_BYTES];
    late.push(0);
    assert_eq!(pieces(&late).unwrap().len(), 1);
}
