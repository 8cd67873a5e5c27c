//! Forms with files: `multipart/form-data` (RFC 7578), taken apart in memory.
//!
//! Promises: the parts are ranges of the body, so a form takes no memory beyond its body but for
//! the names of its files. The time is linear in the body. The number of parts, the head of a part,
//! the boundary and all names together have limits.

use std::ops::Range;

/// Maximum files of one form.
pub(crate) const MAX_FILES: usize = 10_000;
/// Maximum bytes of the names of all files.
pub(crate) const MAX_NAMES_BYTES: usize = 1 << 20;
/// Maximum bytes of a boundary, by RFC 2046.
const MAX_BOUNDARY: usize = 70;
/// Maximum bytes of the head of a part: the path of a file, and little else.
const MAX_HEAD: usize = 16 << 10;
/// Maximum lines of a head.
const MAX_HEAD_LINES: usize = 32;

/// A part of a form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FormFile {
    /// The name of the file, if the part has one.
    pub(crate) name: Option<String>,
    /// The bytes of the body that are its content.
    pub(crate) content: Range<usize>,
}

/// Why a form is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FormError {
    #[error("the content-type has no boundary of 1 to {MAX_BOUNDARY} bytes")]
    Boundary,
    #[error("the form ends before its last boundary; send it again")]
    BreaksOff,
    #[error("a boundary is not the end of its line")]
    Line,
    #[error("the head of a part is longer than {MAX_HEAD} bytes or {MAX_HEAD_LINES} lines")]
    Head,
    #[error("a line of the head of a part is not a header")]
    Header,
    #[error("a form has at most {MAX_FILES} files; send several")]
    Files,
    #[error("the names of the files of a form have at most {MAX_NAMES_BYTES} bytes; send several")]
    Names,
}

/// The boundary that a content-type names.
pub(crate) fn boundary(content_type: &str) -> Result<String, FormError> {
    let value = parameter(content_type.as_bytes(), b"boundary").ok_or(FormError::Boundary)?;
    let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=? ".contains(byte);
    let fits = (1..=MAX_BOUNDARY).contains(&value.len());
    if !fits || value.ends_with(b" ") || !value.iter().all(allowed) {
        return Err(FormError::Boundary);
    }
    String::from_utf8(value).map_err(|_| FormError::Boundary)
}

/// The value of a parameter behind the first word of a header. Quoted values may contain an escaped
/// quote.
fn parameter(header: &[u8], wanted: &[u8]) -> Option<Vec<u8>> {
    let mut at = header.iter().position(|byte| *byte == b';')?;
    while at < header.len() {
        let rest = &header[at + 1..];
        let name_end = rest.iter().position(|byte| matches!(byte, b'=' | b';'))?;
        let name = rest[..name_end].trim_ascii();
        at += 1 + name_end;
        if header[at] == b';' {
            continue;
        }
        let mut value = Vec::new();
        let rest = &header[at + 1..];
        let quoted = rest.trim_ascii_start().first() == Some(&b'"');
        let mut used = if quoted { rest.len() - rest.trim_ascii_start().len() + 1 } else { 0 };
        let mut closed = !quoted;
        while let Some(byte) = rest.get(used) {
            used += 1;
            match byte {
                b'"' if quoted => {
                    closed = true;
                    break;
                }
                b'\\' if quoted && rest.get(used) == Some(&b'"') => {
                    value.push(b'"');
                    used += 1;
                }
                b';' if !quoted => {
                    used -= 1;
                    break;
                }
                byte => value.push(*byte),
            }
        }
        at += 1 + used;
        if name.eq_ignore_ascii_case(wanted) {
            let trimmed = if quoted { value } else { value.trim_ascii().to_vec() };
            return closed.then_some(trimmed);
        }
        // Text between a quoted value and the next parameter means nothing.
        at += header.get(at..)?.iter().position(|byte| *byte == b';')?;
    }
    None
}

/// The parts of a form.
pub(crate) fn files(body: &[u8], boundary: &str) -> Result<Vec<FormFile>, FormError> {
    let line = format!("--{boundary}");
    let line = line.as_bytes();
    let (mut files, mut names) = (Vec::new(), 0);
    // A preamble means nothing.
    let mut at = match body.starts_with(line) {
        true => line.len(),
        false => end_of_delimiter(body, 0, line).ok_or(FormError::BreaksOff)?.end,
    };
    loop {
        if body[at..].starts_with(b"--") {
            return Ok(files);
        }
        at += body[at..].iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
        if !body[at..].starts_with(b"\r\n") {
            let cut = matches!(&body[at..], [] | [b'\r'] | [b'-']);
            return Err(if cut { FormError::BreaksOff } else { FormError::Line });
        }
        if files.len() == MAX_FILES {
            return Err(FormError::Files);
        }
        let (name, start) = head(body, at + 2)?;
        names += name.as_ref().map_or(0, String::capacity);
        if names > MAX_NAMES_BYTES {
            return Err(FormError::Names);
        }
        let delimiter = end_of_delimiter(body, start, line).ok_or(FormError::BreaksOff)?;
        files.push(FormFile { name, content: start..delimiter.start });
        at = delimiter.end;
    }
}

/// The next line break with a boundary behind it. The line break of an empty part belongs to its
/// head.
fn end_of_delimiter(body: &[u8], from: usize, line: &[u8]) -> Option<Range<usize>> {
    let mut at = from.saturating_sub(2);
    loop {
        at += body[at..].iter().position(|byte| *byte == b'\r')?;
        if body[at + 1..].starts_with(b"\n") && body[at + 2..].starts_with(line) {
            return Some(at.max(from)..at + 2 + line.len());
        }
        at += 1;
    }
}

/// The file name in the head of a part, and where its content begins.
fn head(body: &[u8], from: usize) -> Result<(Option<String>, usize), FormError> {
    let (mut at, mut name) = (from, None);
    for _ in 0..=MAX_HEAD_LINES {
        let room = &body[at..body.len().min(from + MAX_HEAD)];
        let Some(end) = room.windows(2).position(|pair| pair == b"\r\n") else {
            let cut = body.len() - from < MAX_HEAD;
            return Err(if cut { FormError::BreaksOff } else { FormError::Head });
        };
        let text = &room[..end];
        at += end + 2;
        if text.is_empty() {
            return Ok((name, at));
        }
        let colon = text.iter().position(|byte| *byte == b':').ok_or(FormError::Header)?;
        if name.is_none() && text[..colon].trim_ascii().eq_ignore_ascii_case(b"content-disposition")
        {
            let value = parameter(&text[colon + 1..], b"filename");
            name = value.and_then(|value| String::from_utf8(value).ok());
        }
    }
    Err(FormError::Head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts_of(body: &str, boundary: &str) -> Result<Vec<(Option<String>, String)>, FormError> {
        let files = files(body.as_bytes(), boundary)?;
        Ok(files.into_iter().map(|file| (file.name, body[file.content].to_owned())).collect())
    }

    fn part(head: &str, content: &str) -> String {
        format!("--b\r\n{head}\r\n\r\n{content}\r\n")
    }

    #[test]
    fn the_names_of_all_files_have_a_limit() {
        let form = |files: usize, name: usize| {
            let head = format!("Content-Disposition: form-data; filename={}", "n".repeat(name));
            let part = part(&head, "");
            parts_of(&format!("{}--b--", part.repeat(files)), "b").map(|parts| parts.len())
        };
        assert_eq!(form(100, 4096), Ok(100));
        assert_eq!(form(200, 8192), Err(FormError::Names));
    }

    #[test]
    fn files_have_their_names_and_exact_contents() {
        let disposition = |rest: &str| format!("Content-Disposition: form-data{rest}");
        let body = [
            "a preamble\r\n".to_owned(),
            part(&disposition("; name=\"file\"; filename=\"/home/a b.txt\""), "one\r\n--bc\r\n"),
            part(&format!("content-type: text/x\r\n{}", disposition("; filename=plain")), ""),
            part(&disposition("; filename=\"a\\\"b;c\"; name=x"), "\r\n"),
            part(&disposition("; name=\"filename=no\""), "no file"),
            part("Content-Type: text/plain", "\r\n--\r\n"),
            "--b--\r\nan epilogue".to_owned(),
        ];
        let some = |name: &str| Some(name.to_owned());
        let expected = [
            // A boundary that begins with this one is one.
            (some("/home/a b.txt"), "one"),
        ];
        assert_eq!(parts_of(&body.concat(), "b").unwrap_err(), FormError::Line);
        let body = body.concat().replace("--bc", "--ac");
        let contents = parts_of(&body, "b").unwrap();
        assert_eq!(contents[0].0, expected[0].0);
        let contents: Vec<_> =
            contents.iter().map(|(name, text)| (name.as_deref(), text.as_str())).collect();
        assert_eq!(
            contents,
            [
                (Some("/home/a b.txt"), "one\r\n--ac\r\n"),
                (Some("plain"), ""),
                (Some("a\"b;c"), "\r\n"),
                (None, "no file"),
                (None, "\r\n--\r\n"),
            ]
        );
        assert_eq!(parts_of("--b--", "b").unwrap(), []);
        for empty in ["--b\r\n\r\n\r\n--b--", "--b\r\n\r\n--b--"] {
            assert_eq!(parts_of(empty, "b").unwrap(), [(None, String::new())]);
        }
    }

    #[test]
    fn every_cut_form_is_refused() {
        let whole = part("Content-Disposition: form-data; filename=a", "text") + "--b--";
        assert_eq!(parts_of(&whole, "b").unwrap().len(), 1);
        for end in 0..whole.len() {
            assert_eq!(parts_of(&whole[..end], "b").unwrap_err(), FormError::BreaksOff, "{end}");
        }
    }

    #[test]
    fn hostile_forms_are_refused() {
        let head =
            |lines: &str| parts_of(&format!("--b\r\n{lines}\r\n\r\n--b--"), "b").unwrap_err();
        assert_eq!(head("no header"), FormError::Header);
        assert_eq!(head(&"x: y\r\n".repeat(40)), FormError::Head);
        assert_eq!(head(&format!("x: {}", "y".repeat(MAX_HEAD))), FormError::Head);
        assert_eq!(parts_of("--b x\r\n", "b").unwrap_err(), FormError::Line);
        let many = "--b\r\n\r\n\r\n".repeat(MAX_FILES + 1) + "--b--";
        assert_eq!(parts_of(&many, "b").unwrap_err(), FormError::Files);
        // Linear: lines that are all but a boundary.
        let line = "b".repeat(MAX_BOUNDARY);
        let near = format!("\r\n--{}", &line[1..]).repeat(100_000);
        let body = format!("--{line}\r\n\r\n{near}\r\n--{line}--");
        assert_eq!(parts_of(&body, &line).unwrap()[0].1.len(), near.len());
    }

    #[test]
    fn any_bytes_are_refused_or_have_parts_in_order() {
        let pieces = [
            "\r",
            "\n",
            "\r\n",
            "--b",
            "-",
            "b",
            ":",
            ";",
            "=",
            "\"",
            "\\",
            "\r\n\r\n",
            "\u{e9}",
            "content-disposition:",
            "; filename",
            "\r\n--b",
            "--b--",
            " ",
        ];
        let mut random = 1_u64;
        let mut draw = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % below
        };
        let mut accepted = 0;
        for _ in 0..100_000 {
            let begin = if draw(2) == 0 { "--b\r\n" } else { "" };
            let rest: String = (0..draw(12)).map(|_| pieces[draw(pieces.len())]).collect();
            let end = if draw(2) == 0 { "\r\n--b--" } else { "" };
            let _ = boundary(&rest);
            let body = format!("{begin}{rest}{end}");
            let Ok(files) = files(body.as_bytes(), "b") else { continue };
            accepted += files.len();
            let mut from = 0;
            for file in files {
                assert!(from <= file.content.start && file.content.start <= file.content.end);
                from = file.content.end;
            }
            assert!(from <= body.len());
        }
        assert!(accepted > 1000, "{accepted}");
    }

    #[test]
    fn a_boundary_is_a_short_parameter() {
        let of = |text: &str| boundary(&format!("multipart/form-data{text}"));
        assert_eq!(of("; boundary=abc").unwrap(), "abc");
        assert_eq!(of("; charset=\"a;boundary=no\"; Boundary = \"a b:c\"").unwrap(), "a b:c");
        let long = format!("; boundary={}", "x".repeat(MAX_BOUNDARY + 1));
        for refused in [
            "",
            ";",
            "; boundary",
            "; boundary=",
            "; boundary=\"a",
            "; boundary=\"a \"",
            "; boundary=a\u{e9}",
            &long,
        ] {
            assert_eq!(of(refused), Err(FormError::Boundary), "{refused}");
        }
    }
}
