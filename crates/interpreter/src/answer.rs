//! The result of code: a value, or an exception.

use minicbor::Decoder;
use minicbor::data::Type;
use minicbor::decode::Error;
use serde_json::Value;

use crate::value;

/// The result of code.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// It came to its end.
    Done,
    /// The same, and its last expression has a value.
    Value(RenderedValue),
    /// It threw something.
    Threw(Thrown),
}

/// A value, as it is shown.
#[derive(Clone, Debug, PartialEq)]
pub struct RenderedValue {
    /// For people, as the language shows it.
    pub text: String,
    /// As JSON, where it can be.
    pub json: Option<Value>,
}

/// What code threw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thrown {
    /// Its kind.
    pub name: String,
    /// What it says.
    pub message: String,
    /// The stack trace, in the format of the language.
    pub trace: Option<String>,
}

/// An answer that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("the guest gave no answer that is known: {0}")]
pub struct AnswerError(String);

impl From<Error> for AnswerError {
    fn from(error: Error) -> Self {
        Self(error.to_string())
    }
}

impl Answer {
    /// Reads the answer of a guest.
    ///
    /// # Errors
    /// [`AnswerError`].
    pub fn read(answer: &[u8]) -> Result<Self, AnswerError> {
        let mut from = Decoder::new(answer);
        match (from.array()?, from.u8()?) {
            (Some(3), 0) => {
                let begin = from.position();
                let json = value::read(&mut from)?;
                if from.datatype()? != Type::Null {
                    let text = from.str()?;
                    let nothing = text.is_empty() && json == Some(Value::Null);
                    return Ok(match nothing {
                        true => Self::Done,
                        false => Self::Value(RenderedValue { text: text.to_owned(), json }),
                    });
                }
                // The guest leaves it to the host how plain values show.
                from.set_position(begin);
                Ok(match from.datatype()? {
                    Type::Undefined => Self::Done,
                    _ => Self::Value(RenderedValue { text: value::text(&mut from)?, json }),
                })
            }
            (Some(5), 1) => {
                let (name, message) = (from.str()?.to_owned(), from.str()?.to_owned());
                let trace = match from.datatype()? {
                    Type::Null => None,
                    _ => Some(from.str()?.to_owned()),
                };
                Ok(Self::Threw(Thrown { name, message, trace }))
            }
            (count, first) => {
                Err(AnswerError(format!("it begins with {first}, in an array of {count:?}")))
            }
        }
    }
}

impl Thrown {
    /// Everything that is known of it, as a traceback.
    #[must_use]
    pub fn traceback(&self) -> String {
        let said = format!("{}: {}", self.name, self.message);
        match &self.trace {
            // The trace of the language may contain it already.
            Some(trace) if trace.contains(&said) => trace.clone(),
            Some(trace) => format!("{said}\n{trace}"),
            None => said,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str, json: Value) -> Answer {
        Answer::Value(RenderedValue { text: text.to_owned(), json: Some(json) })
    }

    #[test]
    fn values_and_exceptions_of_code_are_distinguished() {
        let read = |bytes: &[u8]| Answer::read(bytes).unwrap();
        assert_eq!(read(b"\x83\x00\xf7\xf6"), Answer::Done);
        assert_eq!(read(b"\x83\x00\xf6\x60"), Answer::Done);
        assert_eq!(read(b"\x83\x00\xf6\xf6"), value("null", Value::Null));
        assert_eq!(read(b"\x83\x00\x18\x2a\xf6"), value("42", 42.into()));
        assert_eq!(read(b"\x83\x00\x82\x01\x02\x66[1, 2]"), value("[1, 2]", vec![1, 2].into()));
        let Answer::Threw(thrown) = read(b"\x85\x01\x61E\x61m\x68at there\xf6") else { panic!() };
        assert_eq!(thrown.traceback(), "E: m\nat there");
        let Answer::Threw(thrown) = read(b"\x85\x01\x61E\x61m\xf6\xf6") else { panic!() };
        assert_eq!(thrown.traceback(), "E: m");
        for broken in [&b""[..], b"\x00", b"\x83\x00\x01", b"\x84\x00\x01\xf6\xf6", b"\x85\x01\x01"]
        {
            assert!(Answer::read(broken).is_err(), "{broken:?}");
        }
    }
}
