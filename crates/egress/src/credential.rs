//! Credentials: headers with a secret of the host, which the guest never has.
//!
//! Promises: a secret is in no error, in no log and in no debug output. A file is read for each
//! request, so that a rotated secret counts at once.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::request_head::{HOP_BY_HOP, folded, is_token, is_value_byte};

/// Maximum bytes of a secret.
const MAX_SECRET: u64 = 16 << 10;

/// The table of a credential.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CredentialTable {
    header: String,
    env: Option<String>,
    file: Option<PathBuf>,
    #[serde(default)]
    prefix: String,
    placeholder: Option<String>,
}

#[derive(PartialEq, Eq)]
enum Source {
    Secret(String),
    File(PathBuf),
}

/// A header with a secret.
pub(crate) struct Credential {
    header: String,
    prefix: String,
    source: Source,
    placeholder: Option<String>,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential").field("header", &self.header).finish_non_exhaustive()
    }
}

/// A secret that is fit for a header, without a line feed at its end.
fn checked(secret: &str) -> Option<&str> {
    let secret = secret.trim_end_matches(['\r', '\n']);
    (!secret.is_empty() && secret.bytes().all(is_value_byte)).then_some(secret)
}

fn read(path: &Path) -> Result<String, String> {
    let shown = path.display();
    let mut text = String::new();
    let file = File::open(path)
        .map_err(|error| format!("the secret in {shown} cannot be read: {error}"))?;
    // The error of a file that is no text could show its content.
    let read = file.take(MAX_SECRET + 1).read_to_string(&mut text);
    read.map_err(|_| format!("the secret in {shown} cannot be read as text"))?;
    if text.len() as u64 > MAX_SECRET {
        return Err(format!("the secret in {shown} is longer than 16 KiB"));
    }
    let secret = checked(&text)
        .ok_or_else(|| format!("the secret in {shown} is empty, or not one line of text"))?;
    Ok(secret.to_owned())
}

impl Credential {
    pub(crate) fn new(table: CredentialTable) -> Result<Self, String> {
        let header = table.header.to_ascii_lowercase();
        if !is_token(header.as_bytes()) {
            return Err(format!("the header `{header}` of its credential has an invalid name"));
        }
        if folded(&header) == "host" || HOP_BY_HOP.contains(&&*folded(&header)) {
            return Err(format!(
                "the header `{header}` belongs to the connection and cannot have a credential"
            ));
        }
        if !table.prefix.bytes().all(is_value_byte) {
            return Err("the prefix of its credential is invalid in a header".to_owned());
        }
        if let Some(name) = &table.placeholder
            && (name.is_empty() || name.contains(['=', '\0']))
        {
            return Err(
                "`placeholder` is the name of a variable in the guest's environment".to_owned()
            );
        }
        let source = match (table.env, table.file) {
            (Some(name), None) => {
                let value = std::env::var(&name);
                let secret = value.map_err(|_| {
                    format!("the variable {name} of its credential is not set, or no text")
                })?;
                let secret = checked(&secret).ok_or_else(|| {
                    format!(
                        "the variable {name} of its credential is empty, or not one line of text"
                    )
                })?;
                Source::Secret(secret.to_owned())
            }
            (None, Some(path)) if !path.is_absolute() => {
                return Err(format!(
                    "the file of its credential is not absolute: {}",
                    path.display()
                ));
            }
            (None, Some(path)) => {
                read(&path)?;
                Source::File(path)
            }
            _ => {
                return Err(
                    "a credential has either `env` or `file`, which name its secret".to_owned()
                );
            }
        };
        Ok(Self { header, prefix: table.prefix, source, placeholder: table.placeholder })
    }

    /// Whether both set the same header to the same secret, or to that of the same file.
    pub(crate) fn is_equivalent(&self, other: &Self) -> bool {
        let Self { header, prefix, source, placeholder } = self;
        (header, prefix, source, placeholder)
            == (&other.header, &other.prefix, &other.source, &other.placeholder)
    }

    /// The name of the header, in lower case.
    pub(crate) fn header(&self) -> &str {
        &self.header
    }

    pub(crate) fn placeholder(&self) -> Option<&str> {
        self.placeholder.as_deref()
    }

    /// The value of the header, with the present secret.
    pub(crate) fn value(&self) -> Result<Vec<u8>, String> {
        let secret = match &self.source {
            Source::Secret(secret) => secret.clone(),
            Source::File(path) => read(path)?,
        };
        Ok([self.prefix.as_bytes(), secret.as_bytes()].concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotated_file_counts_at_once_and_nothing_shows_the_secret() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        std::fs::write(&path, "first-secret\n").unwrap();
        let table = serde_json::json!({
            "header": "Authorization", "prefix": "Bearer ", "file": path, "placeholder": "API_KEY",
        });
        let credential = Credential::new(serde_json::from_value(table).unwrap()).unwrap();
        assert_eq!(credential.value().unwrap(), b"Bearer first-secret");
        std::fs::write(&path, "second-secret").unwrap();
        assert_eq!(credential.value().unwrap(), b"Bearer second-secret");
        assert!(!format!("{credential:?}").contains("secret"));
        std::fs::write(&path, "broken\nsecret").unwrap();
        let error = credential.value().unwrap_err();
        assert!(error.contains("one line") && !error.contains("broken"), "{error}");
    }

    #[test]
    fn another_secret_of_the_environment_makes_another_credential() {
        let credential = |secret: &str| Credential {
            header: "x-key".to_owned(),
            prefix: String::new(),
            source: Source::Secret(secret.to_owned()),
            placeholder: None,
        };
        assert!(credential("first").is_equivalent(&credential("first")));
        assert!(!credential("first").is_equivalent(&credential("second")));
        let file = Credential { source: Source::File("first".into()), ..credential("first") };
        assert!(!credential("first").is_equivalent(&file));
    }
}
