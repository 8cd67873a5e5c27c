//! How a guest that runs code is asked, and what it answers: one small trait, so that another language is
//! another implementation.

use serde_json::{Value, json};

/// Where something was printed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// What came of a piece of code, each apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// What it printed, in order.
    pub printed: Vec<(Stream, String)>,
    /// Its value, where it has one.
    pub value: Option<Shown>,
    /// What it threw.
    pub error: Option<Thrown>,
}

/// A value, as it is shown.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// For people.
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
    pub value: String,
    /// Where it was thrown.
    pub traceback: String,
}

/// A language that guests run.
pub trait Language: Send + Sync {
    /// What clients call it.
    fn names(&self) -> &'static [&'static str];

    /// The bytes that ask a guest to run `code`.
    fn request(&self, code: &str) -> Vec<u8>;

    /// What the guest's answer means.
    ///
    /// # Errors
    /// Why it is no answer.
    fn outcome(&self, answer: &[u8]) -> Result<Outcome, String>;
}

/// The language of this name, if a guest is known to run it.
#[must_use]
pub fn named(name: &str) -> Option<&'static dyn Language> {
    let all: [&'static dyn Language; 1] = [&Script];
    all.into_iter().find(|language| language.names().contains(&name))
}

/// JavaScript, as the guest `script` of this repository runs it.
struct Script;

impl Language for Script {
    fn names(&self) -> &'static [&'static str] {
        &["javascript", "js"]
    }

    fn request(&self, code: &str) -> Vec<u8> {
        json!({ "code": code }).to_string().into_bytes()
    }

    fn outcome(&self, answer: &[u8]) -> Result<Outcome, String> {
        let answer: Value = serde_json::from_slice(answer).map_err(|error| error.to_string())?;
        // What cannot even be run is an error in text.
        if let Some(why) = answer["error"].as_str() {
            return Err(why.to_owned());
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let printed = answer["printed"].as_array().ok_or("it says nothing of what was printed")?;
        let printed = printed.iter().map(|line| {
            let stream = match line[0].as_str() {
                Some("stderr") => Stream::Stderr,
                _ => Stream::Stdout,
            };
            (stream, text(&line[1]))
        });
        let value = answer
            .get("value")
            .map(|value| Shown { text: text(&value["text"]), json: value.get("json").cloned() });
        let error = answer.get("error").map(|error| Thrown {
            name: text(&error["name"]),
            value: text(&error["value"]),
            traceback: text(&error["traceback"]),
        });
        Ok(Outcome { printed: printed.collect(), value, error })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_script_printed_gave_and_threw_is_read_apart() {
        let script = named("javascript").unwrap();
        assert_eq!(script.request("1 + \"x\""), br#"{"code":"1 + \"x\""}"#);
        let answer = br#"{"printed":[["stdout","a\n"],["stderr","b\n"]],"value":{"text":"{ x: 1 }","json":{"x":1}}}"#;
        let outcome = script.outcome(answer).unwrap();
        assert_eq!(
            outcome.printed,
            [(Stream::Stdout, "a\n".to_owned()), (Stream::Stderr, "b\n".to_owned())]
        );
        assert_eq!(outcome.value.unwrap().json, Some(json!({"x": 1})));
        let answer = br#"{"printed":[],"error":{"name":"E","value":"m","traceback":"E: m"}}"#;
        assert_eq!(script.outcome(answer).unwrap().error.unwrap().name, "E");
        for wrong in [&b""[..], b"{}", br#"{"error":"no memory"}"#] {
            assert!(script.outcome(wrong).is_err());
        }
        assert!(named("cobol").is_none());
    }
}
