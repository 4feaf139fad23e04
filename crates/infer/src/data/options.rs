//! Options of reading text.

use serde::{Deserialize, Serialize};

/// Texts to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Files, folders and globs, relative to the current folder, and `-` for standard input. Empty for the text of
    /// the checkout that contains the current folder.
    pub paths: Vec<String>,
    /// The format of the files.
    pub format: DataFormat,
    /// The field of JSON rows, or column of CSV and Parquet files, that holds the text.
    pub text_field: String,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self { paths: Vec::new(), format: DataFormat::Auto, text_field: "text".into() }
    }
}

/// The format of data files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataFormat {
    /// The format is detected by names and first bytes, with plain text as the default.
    #[default]
    Auto,
    /// Each file is one document.
    Text,
    /// JSON: one object per line, or an array of objects.
    #[serde(alias = "jsonl")]
    Json,
    /// A table whose first row names the columns.
    #[serde(alias = "tsv")]
    Csv,
    /// Parquet.
    Parquet,
}

impl std::str::FromStr for DataFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        use serde::de::IntoDeserializer;
        use serde::de::value::{Error, StrDeserializer};
        let name: StrDeserializer<'_, Error> = name.into_deserializer();
        Self::deserialize(name).map_err(|_| "must be auto, text, json, csv or parquet".into())
    }
}
