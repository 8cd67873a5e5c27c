//! Results that code displays, in their formats.
//!
//! Promises: the results of a call take a bounded amount of memory, whatever the guest sends.
//! Formats that are JSON become Python objects while the room for them lasts.

use pyo3::IntoPyObject;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// Maximum results of one call.
const MAX_RESULTS: usize = 256;
/// Maximum bytes of all results of one call.
const MAX_BYTES: usize = 64 << 20;
/// Maximum bytes of results with formats that are JSON. A Python object can take 30 times its
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

/// A result: whether it is the value of the last expression, its formats that are text, and the
/// whole object in JSON if it has other formats, and there is room for them.
#[derive(IntoPyObject)]
pub(crate) struct DisplayedResult(bool, Vec<(&'static str, String)>, Option<Vec<u8>>);

/// The results of one call.
#[derive(Default)]
pub(crate) struct DisplayedResults {
    pub(crate) results: Vec<DisplayedResult>,
    bytes: usize,
    json_bytes: usize,
}

impl DisplayedResults {
    /// Takes a result, an object in JSON. Returns `false` if a part of it is dropped.
    #[must_use]
    pub(crate) fn take(&mut self, result: &[u8]) -> bool {
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
            result.to_vec()
        });
        self.results.push(DisplayedResult(formats.is_main_result, texts, json));
        has_room || !has_others
    }
}
