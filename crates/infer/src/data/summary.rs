//! Figures of the data that was read.

use std::fmt;

/// Figures of the data that was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadSummary {
    /// The number of files with documents.
    pub num_files: usize,
    /// The number of documents: text files, and rows with a text.
    pub num_documents: u64,
    /// The bytes of their text.
    pub num_text_bytes: u64,
    /// The number of their tokens.
    pub num_tokens: u64,
}

impl fmt::Display for ReadSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = |number: u64, one: &str| {
            let digits = number.to_string();
            let grouped: Vec<&str> =
                digits.as_bytes().rchunks(3).rev().filter_map(|part| str::from_utf8(part).ok()).collect();
            format!("{} {one}{}", grouped.join(","), if number == 1 { "" } else { "s" })
        };
        let Self { num_files, num_documents, num_text_bytes, num_tokens } = *self;
        let numbers =
            [(num_files as u64, "file"), (num_documents, "document"), (num_text_bytes, "byte"), (num_tokens, "token")];
        let parts = numbers.map(|(number, one)| counted(number, one));
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_its_thousands_set_apart() {
        let summary = ReadSummary { num_files: 1, num_documents: 12_345, num_text_bytes: 1_234_567, num_tokens: 999 };
        assert_eq!(summary.to_string(), "1 file, 12,345 documents, 1,234,567 bytes, 999 tokens");
    }
}
