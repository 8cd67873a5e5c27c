//! Paths of requests: one normal form that is matched and sent, and the patterns of rules.
//!
//! Promises: the server receives the path that was matched. A path that servers read in more than
//! one way is refused: an encoded slash, percent sign of another encoding, backslash or control
//! character, an empty segment in the middle, dots or nothing before a path parameter. May break
//! it: a server that rewrites paths.

use serde::Deserialize;

/// Maximum bytes of a request target.
pub(crate) const MAX_TARGET: usize = 8 << 10;
/// Maximum bytes of a pattern.
const MAX_PATTERN: usize = 1024;

/// A request target in normal form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestTarget {
    /// The path for the server. Bytes that need no encoding are not encoded.
    path: String,
    /// The segments of the path, decoded.
    segments: Vec<Vec<u8>>,
    query: Option<String>,
}

fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)
}

/// Bytes that a target may have without an encoding.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b"\"<>\\^`{|}#".contains(&byte)
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

/// A segment without path parameters, which some servers cut off.
fn without_parameters(segment: &[u8]) -> &[u8] {
    segment.split(|byte| *byte == b';').next().unwrap_or_default()
}

/// One segment: its form for the server, and its bytes.
fn segment(text: &[u8]) -> Result<(String, Vec<u8>), &'static str> {
    let (mut sent, mut decoded) = (String::new(), Vec::new());
    let mut rest = text;
    while let [first, tail @ ..] = rest {
        if *first != b'%' {
            if !is_plain(*first) {
                return Err("its path has a character that has to be percent-encoded");
            }
            sent.push(char::from(*first));
            decoded.push(*first);
            rest = tail;
            continue;
        }
        let [high, low, tail @ ..] = tail else {
            return Err("its path has an incomplete percent-encoding");
        };
        let (Some(high), Some(low)) = (hex(*high), hex(*low)) else {
            return Err("its path has an invalid percent-encoding");
        };
        let byte = high << 4 | low;
        match byte {
            b'/' | b'\\' => return Err("its path has an encoded slash"),
            0..0x20 | 0x7f => return Err("its path has an encoded control character"),
            byte if is_unreserved(byte) => sent.push(char::from(byte)),
            byte => sent.push_str(&format!("%{byte:02X}")),
        }
        decoded.push(byte);
        rest = tail;
    }
    let is_encoding =
        |three: &[u8]| three[0] == b'%' && hex(three[1]).is_some() && hex(three[2]).is_some();
    if decoded.windows(3).any(is_encoding) {
        return Err("its path is percent-encoded twice");
    }
    let name = without_parameters(&decoded);
    if name.len() < decoded.len() && matches!(name, b"" | b"." | b"..") {
        return Err("its path has dots, or nothing, before a path parameter");
    }
    Ok((sent, decoded))
}

impl RequestTarget {
    /// Reads a target in origin form.
    ///
    /// # Errors
    /// The reason that it is refused.
    pub fn parse(target: &[u8]) -> Result<Self, &'static str> {
        if target.len() > MAX_TARGET {
            return Err("its target is longer than 8 KiB");
        }
        let (path, query) = match target.iter().position(|byte| *byte == b'?') {
            Some(at) => (&target[..at], Some(&target[at + 1..])),
            None => (target, None),
        };
        let Some(path) = path.strip_prefix(b"/") else {
            return Err("its target does not begin with a slash");
        };
        let query = match query {
            None => None,
            Some(query) if query.iter().all(|b| b.is_ascii_graphic() && *b != b'#') => {
                Some(String::from_utf8_lossy(query).into_owned())
            }
            Some(_) => return Err("its query has a character that has to be percent-encoded"),
        };
        let mut all: Vec<(String, Vec<u8>)> = Vec::new();
        let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        for (index, part) in parts.iter().enumerate() {
            let is_last = index + 1 == parts.len();
            let (sent, decoded) = segment(part)?;
            match &decoded[..] {
                b"." | b".." => {
                    if decoded == b".." && all.pop().is_none() {
                        return Err("its path leads above the root");
                    }
                    if is_last {
                        all.push(Default::default());
                    }
                }
                b"" if !is_last => return Err("its path has an empty segment"),
                _ => all.push((sent, decoded)),
            }
        }
        let path = all.iter().fold(String::new(), |path, (sent, _)| path + "/" + sent);
        Ok(Self { path, segments: all.into_iter().map(|(_, decoded)| decoded).collect(), query })
    }

    /// The path, without its query.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The target for the server.
    #[must_use]
    pub fn to_sent(&self) -> String {
        match &self.query {
            Some(query) => format!("{}?{query}", self.path),
            None => self.path.clone(),
        }
    }
}

/// Text that is no [`PathPattern`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is no pattern of paths: {why}; write it decoded, as in /v1/models, /v1/*/files or /v1/**"
)]
pub struct ParsePatternError {
    text: String,
    why: &'static str,
}

/// Paths that a rule allows: `*` is any part of one segment, a segment `*` one that is not empty,
/// and a segment `**` any number of segments.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct PathPattern(Vec<String>);

impl TryFrom<String> for PathPattern {
    type Error = ParsePatternError;

    fn try_from(text: String) -> Result<Self, ParsePatternError> {
        let bad = |why| ParsePatternError { text: text.chars().take(200).collect(), why };
        if text.len() > MAX_PATTERN {
            return Err(bad("it is longer than 1024 bytes"));
        }
        let path = text.strip_prefix('/').ok_or_else(|| bad("it does not begin with a slash"))?;
        if path.contains(['?', '#', '%', '\\']) || path.chars().any(char::is_control) {
            return Err(bad("it has a query, an encoding or a character that no path has"));
        }
        let parts: Vec<String> = path.split('/').map(str::to_owned).collect();
        let middle = &parts[..parts.len() - 1];
        if middle.iter().any(String::is_empty) {
            return Err(bad("it has an empty segment"));
        }
        if parts.iter().any(|part| part == "." || part == "..") {
            return Err(bad("it has a dot segment, which no normal path has"));
        }
        if parts.iter().any(|part| part.contains("**") && part != "**") {
            return Err(bad("`**` is a whole segment"));
        }
        Ok(Self(parts))
    }
}

/// Whether a segment matches a pattern with stars.
fn matches_segment(pattern: &[u8], segment: &[u8]) -> bool {
    let (mut p, mut s) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while s < segment.len() {
        if pattern.get(p) == Some(&b'*') {
            star = Some((p, s));
            p += 1;
        } else if pattern.get(p) == Some(&segment[s]) {
            (p, s) = (p + 1, s + 1);
        } else if let Some((at, from)) = star {
            // The last star takes one more byte.
            star = Some((at, from + 1));
            (p, s) = (at + 1, from + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

impl PathPattern {
    /// Whether it allows a path, both with its path parameters (`;`) and without them.
    #[must_use]
    pub fn matches(&self, target: &RequestTarget) -> bool {
        self.matches_by(target, |segment| segment) && self.matches_by(target, without_parameters)
    }

    fn matches_by(&self, target: &RequestTarget, part: fn(&[u8]) -> &[u8]) -> bool {
        // Whether the patterns so far match the first segments, for each number of segments.
        let mut reached = vec![false; target.segments.len() + 1];
        reached[0] = true;
        for pattern in &self.0 {
            let mut next = vec![false; reached.len()];
            for at in 0..reached.len() {
                if pattern == "**" {
                    next[at] = reached[at] || at > 0 && next[at - 1];
                } else if at > 0 && reached[at - 1] {
                    let segment = part(&target.segments[at - 1]);
                    // A whole segment is not empty: `/users/` is no user.
                    next[at] = (pattern != "*" || !segment.is_empty())
                        && matches_segment(part(pattern.as_bytes()), segment);
                }
            }
            reached = next;
        }
        reached.last().copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn target(text: &str) -> RequestTarget {
        RequestTarget::parse(text.as_bytes()).unwrap()
    }

    fn pattern(text: &str) -> PathPattern {
        PathPattern::try_from(text.to_owned()).unwrap()
    }

    #[test]
    fn targets_have_one_normal_form() {
        for (given, sent) in [
            ("/", "/"),
            ("/v1/models", "/v1/models"),
            ("/v1/../v2/./a/", "/v2/a/"),
            ("/v1/%2e%2E/v2", "/v2"),
            ("/%7Euser/%61%3a?q=%2F", "/~user/a%3A?q=%2F"),
            ("/a/..", "/"),
            ("/a/b/.", "/a/b/"),
            ("/%C3%A9", "/%C3%A9"),
        ] {
            assert_eq!(target(given).to_sent(), sent, "{given}");
        }
        for refused in [
            "",
            "*",
            "v1",
            "http://a.test/",
            "//a.test/x",
            "/a//b",
            "/..",
            "/a/../../b",
            "/a%2fb",
            "/a%5Cb",
            "/a\\b",
            "/%00",
            "/%0d%0a",
            "/%2",
            "/%zz",
            "/%252e%252e/x",
            "/%25%32%65%25%32%65/x",
            "/%25%32%66",
            "/%25%32e",
            "/v1/;/admin",
            "/v1/;",
            "/v1/%3Bx",
            "/..;/admin",
            "/.;x=1/a",
            "/a b",
            "/a#b",
            "/?a#b",
            "/?a b",
            "/é",
        ] {
            assert!(RequestTarget::parse(refused.as_bytes()).is_err(), "{refused}");
        }
    }

    #[test]
    fn patterns_match_whole_paths() {
        for (text, path, expected) in [
            ("/v1/models", "/v1/models", true),
            ("/v1/models", "/v1/models/", false),
            ("/v1/models", "/v1/models/x", false),
            ("/v1/**", "/v1/a/b", true),
            ("/v1/**", "/v1", true),
            ("/v1/**", "/v10", false),
            ("/v1/**", "/v1/../v2", false),
            ("/**", "/", true),
            ("/v1/*", "/v1/a", true),
            ("/v1/*", "/v1/a/b", false),
            ("/repos/*/files/*.txt", "/repos/x/files/a.b.txt", true),
            ("/repos/*/files/*.txt", "/repos/x/y/files/a.txt", false),
            ("/**/end", "/a/b/end", true),
            ("/a/é", "/a/%C3%A9", true),
            ("/v1/*.txt", "/v1/admin;.txt", false),
            ("/v1/*.txt", "/v1/a.txt;x.txt", true),
            ("/v1/*.txt", "/v1/admin%3B.txt", false),
            ("/v1/a;v=1", "/v1/a;v=1", true),
            ("/v1/a;v=1", "/v1/a", false),
            ("/users/*", "/users/", false),
            ("/users/*", "/users/%20", true),
            ("/*", "/", false),
            ("/v1/**", "/v1/", true),
        ] {
            assert_eq!(pattern(text).matches(&target(path)), expected, "{text} {path}");
        }
        for bad in ["v1", "/a//b", "/a%2f", "/a?b", "/../a", "/a**", "/\n"] {
            let error = PathPattern::try_from(bad.to_owned()).unwrap_err().to_string();
            assert!(error.contains("/v1/**"), "{error}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

        /// A server that decodes again, or resolves dots itself, sees the path that was matched.
        #[test]
        fn a_normal_form_is_stable(text in "/([a-c./;%2eEfF5cC]|%2e|%2F|%25|%32|%36|%65){0,12}") {
            if let Ok(found) = RequestTarget::parse(text.as_bytes()) {
                let again = RequestTarget::parse(found.to_sent().as_bytes()).unwrap();
                prop_assert_eq!(&again, &found);
                prop_assert!(!found.path().split('/').any(|part| part == ".." || part == "."));
                prop_assert!(pattern("/**").matches(&found));
                if pattern("/a/**").matches(&found) {
                    prop_assert!(found.path() == "/a" || found.path().starts_with("/a/"));
                }
            }
        }

        #[test]
        fn stars_match_as_a_search_does(pattern in "[ab*]{0,6}", text in "[ab]{0,8}") {
            fn slow(p: &[u8], s: &[u8]) -> bool {
                match p {
                    [] => s.is_empty(),
                    [b'*', rest @ ..] => (0..=s.len()).any(|at| slow(rest, &s[at..])),
                    [first, rest @ ..] => s.first() == Some(first) && slow(rest, &s[1..]),
                }
            }
            let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
            prop_assert_eq!(matches_segment(pattern, text), slow(pattern, text));
        }
    }
}
