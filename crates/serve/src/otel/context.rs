//! Trace context: the header `traceparent` of the W3C recommendation Trace Context.
//!
//! Promises: a header that does not follow the recommendation is ignored, with its `tracestate`.

use hyper::HeaderMap;
use hyper::header::HeaderName;

pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub(super) const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Maximum characters of `tracestate` that are kept; longer ones may be dropped whole.
const STATE: usize = 512;

/// A span, as those know it that its work is handed on to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    pub(super) trace: u128,
    pub(super) span: u64,
    /// Whether the origin of the trace keeps it.
    pub(super) sampled: bool,
}

/// A number in lower-case hex of just this length; not zero, which is no id.
fn hex(text: &str, length: usize) -> Option<u128> {
    let digits = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() != length || !text.bytes().all(digits) {
        return None;
    }
    u128::from_str_radix(text, 16).ok()
}

impl Context {
    /// A context from the text of the header.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let version = hex(parts.next()?, 2)?;
        let trace = hex(parts.next()?, 32).filter(|trace| *trace != 0)?;
        let span = hex(parts.next()?, 16).and_then(|span| u64::try_from(span).ok())?;
        let flags = hex(parts.next()?, 2)?;
        // Later versions may have more fields.
        let known = version == 0 && parts.next().is_some();
        if known || version == 0xff || span == 0 {
            return None;
        }
        Some(Self { trace, span, sampled: flags & 1 == 1 })
    }

    /// The text of the header.
    #[must_use]
    pub fn text(&self) -> String {
        format!("00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

/// The context and state that a request came with, as text; `None` without one, or with more than
/// one.
pub(crate) fn read_headers(headers: &HeaderMap) -> Option<(&str, &str)> {
    let mut all = headers.get_all(TRACEPARENT).iter();
    let parent = all.next()?.to_str().ok()?;
    if all.next().is_some() || Context::read(parent).is_none() {
        return None;
    }
    let mut states = headers.get_all(TRACESTATE).iter();
    let state = states.next().and_then(|state| state.to_str().ok()).unwrap_or_default();
    let usable = states.next().is_none() && state.len() <= STATE;
    Some((parent, if usable { state } else { "" }))
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    #[test]
    fn a_context_is_what_the_recommendation_says_and_nothing_else() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let context = Context::read(text).unwrap();
        assert_eq!(context.trace, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!((context.span, context.sampled), (0x00f0_67aa_0ba9_02b7, true));
        assert_eq!(context.text(), text);
        // Unknown flags are not passed on; a later version may define more.
        let later = "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-fe-what-ever";
        let context = Context::read(later).unwrap();
        assert!(!context.sampled);
        assert!(context.text().starts_with("00-") && context.text().ends_with("-00"));
        for bad in [
            "",
            "00",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert_eq!(Context::read(bad), None, "{bad}");
        }
    }

    #[test]
    fn two_parents_or_a_state_without_a_parent_give_no_context() {
        let mut headers = HeaderMap::new();
        headers.append(TRACESTATE, HeaderValue::from_static("a=b"));
        assert_eq!(read_headers(&headers), None);
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        headers.append(TRACEPARENT, HeaderValue::from_static(parent));
        assert_eq!(read_headers(&headers), Some((parent, "a=b")));
        headers.append(TRACEPARENT, HeaderValue::from_static(parent));
        assert_eq!(read_headers(&headers), None);
    }
}
