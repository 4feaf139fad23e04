//! Stop texts, found in text that comes piece by piece.

/// A search for the first of several stop texts, which holds back text that may begin one.
#[derive(Clone, Debug)]
pub struct StopTexts {
    texts: Vec<String>,
    /// Text that may be the beginning of a stop text.
    held: String,
    is_found: bool,
}

impl StopTexts {
    /// Starts a search. Empty stop texts are ignored: they would end every answer before it begins.
    #[must_use]
    pub fn new(texts: &[String]) -> Self {
        let texts = texts.iter().filter(|text| !text.is_empty()).cloned().collect();
        Self { texts, held: String::new(), is_found: false }
    }

    /// Returns whether a stop text has come. No text is shown from then on.
    #[must_use]
    pub fn is_found(&self) -> bool {
        self.is_found
    }

    /// Takes the next piece and returns the text that can be shown: up to a stop text, or up to a possible beginning
    /// of one.
    pub fn push(&mut self, piece: &str) -> String {
        if self.is_found {
            return String::new();
        }
        self.held += piece;
        if let Some(start) = self.texts.iter().filter_map(|text| self.held.find(text.as_str())).min() {
            self.is_found = true;
            let mut shown = std::mem::take(&mut self.held);
            shown.truncate(start);
            return shown;
        }
        let could_begin = |start: usize| self.texts.iter().any(|text| text.starts_with(&self.held[start..]));
        let starts = self.held.char_indices().map(|(start, _)| start);
        let kept = starts.into_iter().find(|&start| could_begin(start)).unwrap_or(self.held.len());
        let rest = self.held.split_off(kept);
        std::mem::replace(&mut self.held, rest)
    }

    /// Returns the text that is still held back, after which no stop text can come.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the text shown of `pieces`, and whether a stop text ended it.
    fn shown(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut watch = StopTexts::new(&stops.iter().map(|&text| text.to_owned()).collect::<Vec<_>>());
        let mut shown: Vec<String> = pieces.iter().map(|piece| watch.push(piece)).collect();
        shown.push(watch.finish());
        (shown, watch.is_found())
    }

    #[test]
    fn a_stop_text_across_pieces_is_never_shown() {
        let (text, is_found) = shown(&["\nUser:"], &["Hello", "\n", "User", ":", " more"]);
        assert_eq!((text.concat().as_str(), is_found), ("Hello", true));
        let (text, is_found) = shown(&["END", "x"], &["a E", "NxD"]);
        assert_eq!((text.concat().as_str(), is_found), ("a EN", true));
        let (text, is_found) = shown(&["é!"], &["caf", "é", "!"]);
        assert_eq!((text.concat().as_str(), is_found), ("caf", true));
    }

    #[test]
    fn text_that_only_begins_like_a_stop_text_is_shown_in_the_end() {
        let (text, is_found) = shown(&["###"], &["a", "##", "b#", "#"]);
        assert_eq!(text, ["a", "", "##b", "", "##"]);
        assert!(!is_found);
        let (text, is_found) = shown(&["aab"], &["aa", "aa", "b", "c"]);
        assert_eq!((text.concat().as_str(), is_found), ("aa", true));
        let (text, is_found) = shown(&["", "z"], &["a", ""]);
        assert_eq!((text.concat().as_str(), is_found), ("a", false));
    }
}
