//! Entry points of fuzz targets, under `cfg(fuzzing)` only.

use crate::OpenError;
use crate::format::json::{parse, weight};
use crate::format::layout::IndexJson;
use crate::format::manifest::{Config, Manifest};

/// A JSON document of a store.
#[derive(Clone, Copy, Debug)]
pub enum JsonDocument {
    /// `index.json`.
    Index,
    /// A manifest.
    Manifest,
    /// A configuration.
    Config,
}

/// Parses a document.
///
/// # Errors
/// [`OpenError`].
pub fn parse_json(document: JsonDocument, text: &[u8]) -> Result<(), OpenError> {
    match document {
        JsonDocument::Index => parse::<IndexJson>("`index.json`", text)?.check(),
        JsonDocument::Manifest => Manifest::parse(text).map(drop),
        JsonDocument::Config => parse::<Config>("the configuration", text)?.check(),
    }
}

/// The memory that a document is charged before it is parsed.
#[must_use]
pub fn json_weight(text: &[u8]) -> usize {
    weight(text)
}
