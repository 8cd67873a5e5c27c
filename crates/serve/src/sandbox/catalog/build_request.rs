//! Requests for builds of templates, in the shape of E2B's API.
//!
//! Promises: a request with something that this server does not have is refused before the build
//! begins.

use std::collections::BTreeMap;

use hyper::StatusCode;

use crate::error_response::ErrorResponse;
use crate::sandbox::catalog::image_name::is_image_name;
use crate::sandbox::http::user::User;
use crate::sandbox::records::record::LAYER;
use crate::sandbox::request_body::template_requests::{BuildPlan, NewTemplate, StepRequest};

/// The tag of a build that names none.
pub(crate) const DEFAULT_TAG: &str = "default";
/// Maximum bytes of a name or a tag.
const MAX_NAME_BYTES: usize = 128;
/// Maximum steps of one build.
const MAX_STEPS: usize = 200;
/// Maximum characters of a line in a message.
const MAX_SHOWN_CHARS: usize = 200;
/// Maximum tags in one request.
const MAX_TAGS: usize = 20;

fn invalid(message: impl Into<String>) -> ErrorResponse {
    ErrorResponse::new(StatusCode::BAD_REQUEST, message.into())
}

impl NewTemplate {
    /// Its name, and its tags.
    pub(crate) fn names(self) -> Result<(String, Vec<String>), ErrorResponse> {
        if self.cpu_count.is_some_and(|count| count != 1) {
            return Err(invalid("`cpuCount` is not supported: each sandbox has one CPU"));
        }
        if self.min_free_disk_mib.is_some_and(|size| size != 0) {
            return Err(invalid(
                "`minFreeDiskMB` is not supported: `files-mib` of the template bounds files",
            ));
        }
        let given = self.name.or(self.alias).unwrap_or_default();
        let (name, tag) = split(&given);
        let mut tags = self.tags.unwrap_or_default();
        tags.extend(tag.map(str::to_owned));
        if tags.is_empty() {
            tags.push(DEFAULT_TAG.to_owned());
        }
        check_tags(&tags)?;
        check_name(name)?;
        tags.sort();
        tags.dedup();
        Ok((name.to_owned(), tags))
    }
}

/// A name and its tag, if it has one.
pub(crate) fn split(name: &str) -> (&str, Option<&str>) {
    name.split_once(':').map_or((name, None), |(name, tag)| (name, Some(tag)))
}

fn is_word(text: &str, further: &str) -> bool {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || further.contains(letter);
    !text.is_empty() && text.len() <= MAX_NAME_BYTES && text.chars().all(fits)
}

/// Refuses names of states after steps, which the server removes by itself.
pub(crate) fn check_reserved(name: &str) -> Result<(), ErrorResponse> {
    match name.starts_with(LAYER) {
        true => Err(invalid(format!(
            "names that begin with `{LAYER}` are reserved for steps of builds"
        ))),
        false => Ok(()),
    }
}

fn check_name(name: &str) -> Result<(), ErrorResponse> {
    check_reserved(&format!("{name}:"))?;
    match is_word(name, "-_./") {
        true => Ok(()),
        false => Err(invalid(format!(
            "a template's name has 1 to {MAX_NAME_BYTES} letters, digits and `-_./`"
        ))),
    }
}

/// Refuses tags that cannot be part of a name.
pub(crate) fn check_tags(tags: &[String]) -> Result<(), ErrorResponse> {
    if tags.is_empty() || tags.len() > MAX_TAGS {
        return Err(invalid(format!("a request has 1 to {MAX_TAGS} tags")));
    }
    match tags.iter().all(|tag| is_word(tag, "-_.")) {
        true => Ok(()),
        false => Err(invalid(format!("a tag has 1 to {MAX_NAME_BYTES} letters, digits and `-_.`"))),
    }
}

/// The names that a build with a tag is found by.
pub(crate) fn tagged(name: &str, tag: &str) -> Vec<String> {
    let short = (tag == DEFAULT_TAG).then(|| name.to_owned());
    short.into_iter().chain([format!("{name}:{tag}")]).collect()
}

/// A step, with all that its result depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) action: Action,
    /// Whether it runs though an earlier build ran it.
    pub(crate) force: bool,
}

/// The effect of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Runs a line of the shell.
    Run { line: String, user: Option<User> },
    /// Copies uploaded files.
    Copy { source: String, target: String, mode: String, files: String, user: Option<User> },
    /// The directory of later steps and of commands.
    Directory(String),
    /// Variables of later steps and of commands.
    Environment(BTreeMap<String, String>),
    /// The user of later steps and of commands.
    User(User),
}

impl Action {
    /// One line for the log.
    pub(crate) fn title(&self) -> String {
        match self {
            Self::Run { line, .. } => format!("RUN {line}"),
            Self::Copy { source, target, .. } => format!("COPY {source} {target}"),
            Self::Directory(path) => format!("WORKDIR {path}"),
            Self::Environment(set) => {
                let names: Vec<_> = set.keys().map(String::as_str).collect();
                format!("ENV {}", names.join(" "))
            }
            Self::User(User::Root) => "USER root".to_owned(),
            Self::User(User::User) => "USER user".to_owned(),
        }
    }
}

/// The user that an argument names.
fn user(name: Option<&String>) -> Result<Option<User>, String> {
    User::named(name.map(String::as_str).unwrap_or_default())
}

impl StepRequest {
    fn read(self) -> Result<Step, ErrorResponse> {
        let args = self.args.unwrap_or_default();
        let of = |at: usize| {
            let missing = || invalid(format!("a step {} lacks an argument", self.kind));
            args.get(at).filter(|text| !text.is_empty()).cloned().ok_or_else(missing)
        };
        let action = match self.kind.as_str() {
            "RUN" => {
                let line = of(0)?;
                // As E2B words it.
                let refused = |why| {
                    let line: String = line.chars().take(MAX_SHOWN_CHARS).collect();
                    invalid(format!(
                        "failed to run command '{line}': command failed: unauthenticated: {why}"
                    ))
                };
                let user = user(args.get(1)).map_err(refused)?;
                Action::Run { line, user }
            }
            "COPY" => {
                let user = user(args.get(2)).map_err(invalid)?;
                let mode = args.get(3).cloned().unwrap_or_default();
                if mode.len() > 4 || !mode.bytes().all(|digit| (b'0'..=b'7').contains(&digit)) {
                    return Err(invalid("the mode of a step COPY is an octal number"));
                }
                let hash = self.files_hash.clone();
                let files = hash.ok_or_else(|| invalid("a step COPY has no `filesHash`"))?;
                Action::Copy { source: of(0)?, target: of(1)?, mode, files, user }
            }
            "WORKDIR" => Action::Directory(of(0)?),
            "ENV" => {
                let (pairs, rest) = args.as_chunks::<2>();
                if !rest.is_empty() || pairs.iter().any(|[name, _]| name.is_empty()) {
                    return Err(invalid("a step ENV has names and values in turn"));
                }
                Action::Environment(
                    pairs.iter().cloned().map(|[name, value]| (name, value)).collect(),
                )
            }
            "USER" => {
                of(0)?;
                Action::User(user(args.first()).map_err(invalid)?.unwrap_or(User::User))
            }
            other => {
                let other: String = other.chars().take(32).collect();
                return Err(invalid(format!(
                    "a step `{other}` is not supported; there are RUN, COPY, WORKDIR, ENV and USER"
                )));
            }
        };
        Ok(Step { action, force: self.force == Some(true) })
    }
}

/// Memory of a string in a list or a map, without its bytes.
const TEXT_BYTES: usize = 48;

impl Step {
    /// An upper bound of its memory.
    fn bytes(&self) -> usize {
        let texts = |texts: &[&String]| -> usize {
            texts.iter().map(|text| text.capacity() + TEXT_BYTES).sum()
        };
        size_of::<Self>()
            + match &self.action {
                Action::Run { line, .. } => texts(&[line]),
                Action::Copy { source, target, mode, files, .. } => {
                    texts(&[source, target, mode, files])
                }
                Action::Directory(path) => texts(&[path]),
                Action::Environment(set) => {
                    set.iter().map(|(name, value)| texts(&[name, value])).sum()
                }
                Action::User(_) => 0,
            }
    }
}

impl BuildPlan {
    /// An upper bound of the memory of a plan and of its steps.
    pub(crate) fn bytes(&self, steps: &[Step]) -> usize {
        let texts = [&self.from_image, &self.from_template, &self.start_cmd, &self.ready_cmd];
        let texts = texts.into_iter().flatten().map(String::capacity).sum::<usize>();
        let steps: usize = steps.iter().map(Step::bytes).sum();
        size_of::<Self>().saturating_add(texts).saturating_add(steps)
    }

    /// Its steps.
    pub(crate) fn take_steps(&mut self) -> Result<Vec<Step>, ErrorResponse> {
        if self.from_image_registry.0 {
            return Err(invalid(
                "`fromImageRegistry` is not supported: the server's own credentials for registries are used",
            ));
        }
        if self.from_image.as_deref().is_some_and(|name| !is_image_name(name)) {
            return Err(invalid(
                "`fromImage` is no name of an OCI image, as in `docker.io/library/python:3`",
            ));
        }
        if self.steps.len() > MAX_STEPS {
            return Err(invalid(format!("a build has at most {MAX_STEPS} steps")));
        }
        let steps = std::mem::take(&mut self.steps).into_iter().map(StepRequest::read);
        steps.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(text: &str) -> Result<Vec<Step>, String> {
        let plan: Result<BuildPlan, _> = serde_json::from_str(text);
        plan.map_err(|error| error.to_string())?.take_steps().map_err(|refusal| refusal.message)
    }

    #[test]
    fn steps_are_read_as_clients_send_them() {
        let read = steps(
            r#"{"force": false, "fromTemplate": "base", "steps": [
                {"type": "RUN", "args": ["true", "root"], "force": false},
                {"type": "COPY", "args": ["a", "b/", "", "0644"], "filesHash": "0a", "force": true, "forceUpload": true},
                {"type": "ENV", "args": ["A", "1", "B", ""], "force": false},
                {"type": "WORKDIR", "args": ["/app"]},
                {"type": "USER", "args": ["root"]},
                {"type": "USER", "args": ["user"]}]}"#,
        );
        let read = read.unwrap();
        let root = Some(User::Root);
        assert_eq!(read[0].action, Action::Run { line: "true".to_owned(), user: root });
        assert!(matches!(&read[1].action, Action::Copy { user: None, .. }));
        assert!(read[1].force && read[1].action.title() == "COPY a b/");
        assert_eq!(read[2].action.title(), "ENV A B");
        assert_eq!(
            (read[3].action.title().as_str(), &read[5].action),
            ("WORKDIR /app", &Action::User(User::User))
        );
        assert_eq!(read[4].action.title(), "USER root");
        for wrong in [
            r#"{"steps": [{"type": "RUN"}]}"#,
            r#"{"steps": [{"type": "RUN", "args": ["x", "nobody"]}]}"#,
            r#"{"steps": [{"type": "COPY", "args": ["a", "b"]}]}"#,
            r#"{"steps": [{"type": "COPY", "args": ["a", "b", "", "u+x"], "filesHash": "0"}]}"#,
            r#"{"steps": [{"type": "ENV", "args": ["A"]}]}"#,
            r#"{"steps": [{"type": "USER", "args": ["nobody"]}]}"#,
            r#"{"steps": [{"type": "USER", "args": [""]}]}"#,
            r#"{"steps": [{"type": "VOLUME", "args": ["/x"]}]}"#,
            r#"{"fromImageRegistry": {"type": "aws"}}"#,
            r#"{"fromImage": "docker.io/library/python:3\n INFO forged\u001b[2J"}"#,
            r#"{"colour": "red"}"#,
        ] {
            assert!(steps(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_template_has_a_name_and_tags() {
        let names = |text: &str| {
            let new: NewTemplate = serde_json::from_str(text).unwrap();
            new.names().map_err(|refusal| refusal.message)
        };
        let of = |name: &str, tags: &[&str]| {
            Ok((name.to_owned(), tags.iter().map(|tag| (*tag).to_owned()).collect::<Vec<_>>()))
        };
        assert_eq!(names(r#"{"name": "a/b"}"#), of("a/b", &["default"]));
        assert_eq!(names(r#"{"name": "a:v1", "tags": ["v2", "v1"]}"#), of("a", &["v1", "v2"]));
        for wrong in [
            r"{}",
            r#"{"name": "a b"}"#,
            r#"{"name": "a:"}"#,
            r#"{"name": "a", "tags": [":"]}"#,
            r#"{"name": "a", "cpuCount": 2}"#,
            r#"{"name": "a", "minFreeDiskMB": 1}"#,
        ] {
            assert!(names(wrong).is_err(), "{wrong}");
        }
        assert_eq!(tagged("a", DEFAULT_TAG), ["a", "a:default"]);
    }

    #[test]
    fn the_memory_of_a_plan_counts_each_text() {
        let bytes = |text: &str| {
            let mut plan: BuildPlan = serde_json::from_str(text).unwrap();
            let steps = plan.take_steps().unwrap();
            plan.bytes(&steps)
        };
        let long = "x".repeat(1000);
        let least = bytes(r#"{"fromTemplate":"base"}"#);
        for text in [
            format!(r#"{{"fromImage":"{long}"}}"#),
            format!(r#"{{"startCmd":"{long}"}}"#),
            format!(r#"{{"readyCmd":"{long}"}}"#),
            format!(r#"{{"steps":[{{"type":"RUN","args":["{long}"]}}]}}"#),
            format!(r#"{{"steps":[{{"type":"ENV","args":["A","{long}"]}}]}}"#),
            format!(r#"{{"steps":[{{"type":"ENV","args":["{long}",""]}}]}}"#),
            format!(r#"{{"steps":[{{"type":"WORKDIR","args":["{long}"]}}]}}"#),
            format!(r#"{{"steps":[{{"type":"COPY","args":["a","{long}"],"filesHash":"0"}}]}}"#),
        ] {
            assert!(bytes(&text) >= least - 4 + 1000, "{text}");
        }
    }
}
