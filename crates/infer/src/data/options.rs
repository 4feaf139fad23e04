//! The options of reading text, and of where its tokens are kept.

use serde::{Deserialize, Serialize};

/// Texts to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextOptions {
    /// Files, folders and globs, relative to the folder that the program is started in, and `-` for standard input;
    /// empty for the text of the checkout that the program stands in.
    pub paths: Vec<String>,
    /// The way in which files hold documents.
    pub format: DataFormat,
    /// Field of JSON rows and column of CSV and Parquet files that holds the text.
    pub text_field: String,
}

impl Default for TextOptions {
    fn default() -> Self {
        Self { paths: Vec::new(), format: DataFormat::Auto, text_field: "text".into() }
    }
}

/// The way in which files hold documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DataFormat {
    /// Their names and their first bytes decide; text where those say nothing.
    #[default]
    Auto,
    /// Each file is one document.
    Text,
    /// JSON: an object a line, or an array of objects.
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
