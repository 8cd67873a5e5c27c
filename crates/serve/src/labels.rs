//! Labels of metrics, and their values.

/// Names and values; the library writes them as they are.
pub(crate) type Labels = Vec<(&'static str, String)>;

/// A guest's name as a label.
pub(crate) fn named(guest: &str) -> (&'static str, String) {
    ("guest", escape(guest))
}

/// Text as a label's value.
pub(crate) fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

pub(crate) fn labels(guest: &str) -> Labels {
    vec![named(guest)]
}

pub(crate) fn two(guest: &str, name: &'static str, value: impl ToString) -> Labels {
    vec![named(guest), (name, value.to_string())]
}

pub(crate) fn gauge(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
