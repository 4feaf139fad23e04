use super::*;

fn texts(text: &[u8]) -> Vec<(String, Range<usize>)> {
    let ids: Vec<u32> = text.iter().copied().map(u32::from).collect();
    pieces(&Tokenizer::bytes(), &ids).unwrap().into_iter().map(|piece| (piece.text, piece.tokens)).collect()
}

#[test]
fn the_bytes_of_a_character_are_one_piece() {
    let found = texts("aß€😀.".as_bytes());
    let expected = [("a", 0..1), ("ß", 1..3), ("€", 3..6), ("😀", 6..10), (".", 10..11)];
    assert_eq!(found, expected.map(|(text, tokens)| (text.to_owned(), tokens)));
}

#[test]
fn every_token_is_in_one_piece_whatever_the_bytes() {
    for bytes in [&b"\xff\xffabc\xe2\x82"[..], b"\xf0\x9f", b"\x80", b"", b"\xef\xbf\xbd\xef\xbf\xbdx"] {
        let found = texts(bytes);
        let tokens: Vec<usize> = found.iter().flat_map(|(_, tokens)| tokens.clone()).collect();
        assert_eq!(tokens, (0..bytes.len()).collect::<Vec<_>>(), "{bytes:?}");
    }
}

#[test]
fn pieces_of_bpe_are_its_tokens() {
    let tokenizer = Tokenizer::train_bpe(&["the cat and the hat and the bat 😀😀"], 290).unwrap();
    let text = "the cat 😀 hat";
    let ids = tokenizer.encode(text).unwrap();
    let found = pieces(&tokenizer, &ids).unwrap();
    assert_eq!(found.iter().map(|piece| piece.text.as_str()).collect::<String>(), text);
    assert!(found.iter().any(|piece| piece.text.len() > 1 && piece.tokens.len() == 1), "{found:?}");
    assert_eq!(found.last().unwrap().tokens.end, ids.len());
}

#[test]
fn labels_show_what_cannot_be_seen() {
    let bytes = Tokenizer::bytes();
    let labels = [32, 10, 9, 65, 0xc3, 256, 0].map(|id| label(&bytes, id).unwrap());
    assert_eq!(labels, ["␣", "↵", "\t", "A", "0xC3", "⟨256⟩", "␀"]);
    assert_eq!("a\u{202e}b\u{1b}".chars().map(visible).collect::<String>(), "a·b␛");
}
