//! Results that code displays, in their formats.
//!
//! Promises: the results of a call take a bounded amount of memory, whatever the guest sends.
//! Formats that are JSON are kept while the room for them lasts, because a decoded value takes many
//! times its bytes.

use serde::Deserialize;
use serde::de::IgnoredAny;

/// Maximum results of one call.
const MAX_RESULTS: usize = 256;
/// Maximum bytes of all results of one call.
const MAX_BYTES: usize = 64 << 20;
/// Maximum bytes of results with formats that are JSON. A decoded value can take 30 times its
/// bytes.
const MAX_JSON: usize = 1 << 20;

/// The formats that are text. Binary ones are in base64.
#[derive(Deserialize)]
struct TextFormats {
    text: Option<String>,
    html: Option<String>,
    markdown: Option<String>,
    latex: Option<String>,
    svg: Option<String>,
    png: Option<String>,
    jpeg: Option<String>,
    pdf: Option<String>,
    javascript: Option<String>,
    #[serde(default)]
    is_main_result: bool,
    json: Option<IgnoredAny>,
    data: Option<IgnoredAny>,
    chart: Option<IgnoredAny>,
    extra: Option<IgnoredAny>,
}

/// A result that code displays.
#[derive(Debug)]
pub struct DisplayedResult {
    /// Whether it is the value of the last expression.
    pub is_main: bool,
    /// Its formats that are text, by their names; binary ones in base64.
    pub texts: Vec<(&'static str, String)>,
    /// The whole object in JSON, if it has other formats, and there is room for them.
    pub json: Option<String>,
}

/// The results of one call.
#[derive(Debug, Default)]
pub struct DisplayedResults {
    /// The results, in the order in which they came.
    pub results: Vec<DisplayedResult>,
    bytes: usize,
    json_bytes: usize,
}

impl DisplayedResults {
    /// Takes a result, an object in JSON. Returns `false` if a part of it is dropped.
    #[must_use]
    pub fn take(&mut self, result: &[u8]) -> bool {
        let is_full = self.results.len() >= MAX_RESULTS || result.len() > MAX_BYTES - self.bytes;
        // The formats could come as a list as well, without their names.
        let is_object = result.trim_ascii_start().starts_with(b"{");
        let parse = || serde_json::from_slice::<TextFormats>(result).ok();
        let parsed = (!is_full && is_object).then(parse);
        let Some(formats) = parsed.flatten() else { return false };
        let others = [&formats.json, &formats.data, &formats.chart, &formats.extra];
        let has_others = others.into_iter().any(Option::is_some);
        let TextFormats { text, html, markdown, latex, svg, png, jpeg, pdf, javascript, .. } =
            formats;
        let all = [
            ("text", text),
            ("html", html),
            ("markdown", markdown),
            ("latex", latex),
            ("svg", svg),
            ("png", png),
            ("jpeg", jpeg),
            ("pdf", pdf),
            ("javascript", javascript),
        ];
        let texts: Vec<_> =
            all.into_iter().filter_map(|(name, text)| Some((name, text?))).collect();
        self.bytes += result.len();
        let has_room = has_others && result.len() <= MAX_JSON - self.json_bytes;
        let json = has_room.then(|| {
            self.json_bytes += result.len();
            String::from_utf8_lossy(result).into_owned()
        });
        self.results.push(DisplayedResult { is_main: formats.is_main_result, texts, json });
        has_room || !has_others
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_kept_within_their_limits() {
        let mut all = DisplayedResults::default();
        assert!(all.take(br#"{"text":"1","is_main_result":true}"#));
        assert!(all.take(br#"{"png":"AA==","chart":{"a":[1]}}"#));
        for wrong in [&b"[]"[..], b"{", b"{\"text\":1}", b"[null, 1]", b"\xff"] {
            assert!(!all.take(wrong), "{wrong:?}");
        }
        let [one, two] = &all.results[..] else { panic!("{all:?}") };
        assert!(one.is_main && one.json.is_none());
        assert_eq!(two.texts, [("png", "AA==".to_owned())]);
        assert_eq!(two.json.as_deref(), Some(r#"{"png":"AA==","chart":{"a":[1]}}"#));
        let large = format!("{{\"text\":\"t\",\"json\":\"{}\"}}", "j".repeat(MAX_JSON));
        assert!(!all.take(large.as_bytes()), "there is no room for its JSON");
        assert!(all.results[2].json.is_none());
        while all.results.len() < MAX_RESULTS {
            assert!(all.take(b"{}"));
        }
        assert!(!all.take(b"{}"));
    }
}
