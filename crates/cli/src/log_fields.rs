//! The fields of events in the log of a server.
//!
//! Promises: an event is one line of printable text, whatever its message and its values are. They
//! may quote strangers: names in requests, and the answers of other servers.

use std::fmt::{self, Debug};

use afresh_serve::printable;
use tracing::field::Field;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

/// The usual format of fields, escaped.
pub(crate) fn printable_fields() -> impl for<'writer> FormatFields<'writer> + 'static {
    debug_fn(write_field).delimited(" ")
}

fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> fmt::Result {
    let text = format!("{value:?}");
    let text = printable(&text);
    match field.name() {
        "message" => write!(writer, "{text}"),
        name => write!(writer, "{}={text}", name.trim_start_matches("r#")),
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn values_of_strangers_stay_within_their_line_of_the_log() {
        let lines = Lines::default();
        let writer = lines.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_writer(move || writer.clone())
            .with_ansi(false)
            .without_time()
            .fmt_fields(printable_fields());
        let forged = "a\n2026 INFO forged\u{1b}[2J\u{2028}";
        let error = io::Error::other(forged);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let _within = tracing::info_span!("request", path = %forged).entered();
            tracing::warn!(image = forged, %error, why = ?forged, number = 7, "said {forged}");
        });
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.matches('\n').count(), 1, "{text:?}");
        assert!(text.ends_with('\n') && !text.contains(['\u{1b}', '\u{2028}']), "{text:?}");
        let plain = r"a\u{a}2026 INFO forged\u{1b}[2J\u{2028}";
        for part in [&format!("said {plain} "), &format!(" error={plain} "), "path=a", " number=7"]
        {
            assert!(text.contains(part), "{part}: {text:?}");
        }
    }
}
