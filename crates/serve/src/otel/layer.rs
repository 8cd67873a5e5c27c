//! From `tracing`'s spans and events to those of OpenTelemetry.
//!
//! Fields are attributes, except those that describe the span itself, by the names in
//! `tracing-opentelemetry`: `otel.name`, `otel.kind`, `otel.status_code`,
//! `otel.status_description`; and `traceparent` and `tracestate` of the request. An event within a
//! span, of the level INFO or worse, becomes an event of that span. Promises: nothing here waits,
//! and the content of each span is bounded.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::counter::Counter;
use tokio::sync::mpsc;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::registry::{LookupSpan, SpanRef};

use super::context::Context;
use super::encode::{FinishedSpan, Kind, SpanEvent, Status, Value};
use super::sampler::Sampler;

/// Maximum attributes of a span or event, and events of a span: OpenTelemetry's defaults.
const MAX_ATTRIBUTES: usize = 128;
/// Maximum bytes of the text of an attribute.
const TEXT: usize = 4096;

/// Data of a span in the layer.
#[derive(Debug)]
pub(super) struct SpanData {
    pub(super) context: Context,
    /// The record of the span, if it is kept.
    written: Option<Box<SpanRecord>>,
}

#[derive(Debug)]
struct SpanRecord {
    finished: FinishedSpan,
    begun: Instant,
}

/// Collects spans for a collector.
#[derive(Debug)]
pub struct Layer {
    sender: mpsc::Sender<FinishedSpan>,
    full: Counter,
    sampler: Sampler,
    ids: Ids,
}

/// Numbers that are unpredictable and unique: hashes of a count, under a key of this process.
#[derive(Debug)]
struct Ids {
    key: RandomState,
    next: AtomicU64,
}

impl Ids {
    /// Never zero, which is no id.
    fn next_id(&self) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.key.hash_one(number).max(1)
    }
}

/// Nanoseconds since 1970.
fn nanoseconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(TEXT)].to_owned()
}

/// Values of the fields of a span or an event.
struct Fields<'a> {
    attributes: &'a mut Vec<(&'static str, Value)>,
    dropped: &'a mut u32,
    own: SpanFields,
}

/// OpenTelemetry's own fields of a span.
#[derive(Default)]
struct SpanFields {
    name: Option<String>,
    message: Option<String>,
    kind: Option<Kind>,
    code: Option<Status>,
    description: Option<String>,
    parent: Option<Context>,
    state: String,
}

impl Fields<'_> {
    fn attribute(&mut self, field: &Field, value: Value) {
        let name = field.name();
        if let Some((_, old)) = self.attributes.iter_mut().find(|(other, _)| *other == name) {
            *old = value;
        } else if self.attributes.len() < MAX_ATTRIBUTES {
            self.attributes.push((name, value));
        } else {
            *self.dropped += 1;
        }
    }
}

impl Visit for Fields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        let own = &mut self.own;
        match field.name() {
            "otel.name" => own.name = Some(cut(value)),
            "otel.kind" => own.kind = Kind::named(value),
            "otel.status_code" => own.code = Status::named(value),
            "otel.status_description" => own.description = Some(cut(value)),
            "message" => own.message = Some(cut(value)),
            "traceparent" => own.parent = Context::read(value),
            "tracestate" => own.state = cut(value),
            _ => self.attribute(field, Value::Text(cut(value))),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.attribute(field, Value::Integer(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        // Theirs have a sign.
        let value = i64::try_from(value).map_or_else(|_| value.to_string().into(), Value::Integer);
        self.attribute(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.attribute(field, Value::Truth(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.attribute(field, Value::Real(value));
    }
}

impl SpanFields {
    fn apply(self, finished: &mut FinishedSpan) {
        if let Some(name) = self.name {
            finished.name = name;
        }
        finished.kind = self.kind.unwrap_or(finished.kind);
        finished.code = self.code.unwrap_or(finished.code);
        if let Some(description) = self.description {
            finished.description = description;
        }
    }
}

impl Layer {
    pub(super) fn new(sender: mpsc::Sender<FinishedSpan>, full: Counter, sampler: Sampler) -> Self {
        let ids = Ids { key: RandomState::new(), next: AtomicU64::new(0) };
        Self { sender, full, sampler, ids }
    }
}

fn context_of<'a, R: LookupSpan<'a>>(span: &SpanRef<'a, R>) -> Option<Context> {
    span.extensions().get::<SpanData>().map(|spanned| spanned.context)
}

impl<S> tracing_subscriber::Layer<S> for Layer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(
        &self,
        attributes: &Attributes<'_>,
        id: &Id,
        all: tracing_subscriber::layer::Context<'_, S>,
    ) {
        let Some(span) = all.span(id) else { return };
        let (mut read, mut dropped) = (Vec::new(), 0);
        let mut fields =
            Fields { attributes: &mut read, dropped: &mut dropped, own: SpanFields::default() };
        attributes.record(&mut fields);
        let mut own = fields.own;
        let remote = own.parent.take();
        let parent = remote.or_else(|| span.parent().and_then(|parent| context_of(&parent)));
        let trace = parent.map_or_else(
            || u128::from(self.ids.next_id()) << 64 | u128::from(self.ids.next_id()),
            |parent| parent.trace,
        );
        let sampled = self.sampler.keeps(trace, parent);
        let context = Context { trace, span: self.ids.next_id(), sampled };
        // A span without room in the queue is not recorded, so that a collector that is away costs
        // little.
        let room = self.sender.capacity() > 0;
        if sampled && !room {
            self.full.inc();
        }
        let written = (sampled && room).then(|| {
            let mut finished = FinishedSpan {
                trace,
                span: context.span,
                parent: parent.map(|parent| parent.span),
                remote: remote.is_some(),
                state: std::mem::take(&mut own.state),
                name: attributes.metadata().name().to_owned(),
                kind: Kind::Internal,
                start: nanoseconds(),
                end: 0,
                attributes: read,
                dropped_attributes: dropped,
                events: Vec::new(),
                dropped_events: 0,
                code: Status::Unset,
                description: String::new(),
            };
            own.apply(&mut finished);
            Box::new(SpanRecord { finished, begun: Instant::now() })
        });
        span.extensions_mut().replace(SpanData { context, written });
    }

    fn on_record(
        &self,
        id: &Id,
        values: &Record<'_>,
        all: tracing_subscriber::layer::Context<'_, S>,
    ) {
        let Some(span) = all.span(id) else { return };
        let mut extensions = span.extensions_mut();
        let Some(written) = extensions.get_mut::<SpanData>().and_then(|s| s.written.as_mut())
        else {
            return;
        };
        let finished = &mut written.finished;
        let mut fields = Fields {
            attributes: &mut finished.attributes,
            dropped: &mut finished.dropped_attributes,
            own: SpanFields::default(),
        };
        values.record(&mut fields);
        let own = fields.own;
        own.apply(finished);
    }

    fn on_event(&self, event: &Event<'_>, all: tracing_subscriber::layer::Context<'_, S>) {
        // Events for the search for faults of the server itself are for logs.
        if *event.metadata().level() > Level::INFO {
            return;
        }
        // Output of guests is for logs, too. Here it would displace events of the server.
        if event.metadata().target() == crate::guest_log::TARGET {
            return;
        }
        let Some(span) = all.event_span(event) else { return };
        let mut extensions = span.extensions_mut();
        let Some(written) = extensions.get_mut::<SpanData>().and_then(|s| s.written.as_mut())
        else {
            return;
        };
        let finished = &mut written.finished;
        if finished.events.len() >= MAX_ATTRIBUTES {
            finished.dropped_events += 1;
            return;
        }
        let about = event.metadata();
        let mut attributes = vec![("level", Value::Text(about.level().to_string()))];
        let mut dropped = 0;
        let mut fields = Fields {
            attributes: &mut attributes,
            dropped: &mut dropped,
            own: SpanFields::default(),
        };
        event.record(&mut fields);
        let name = fields.own.message.unwrap_or_else(|| about.name().to_owned());
        finished.events.push(SpanEvent { time: nanoseconds(), name, attributes, dropped });
    }

    fn on_close(&self, id: Id, all: tracing_subscriber::layer::Context<'_, S>) {
        let Some(span) = all.span(&id) else { return };
        let spanned = span.extensions_mut().remove::<SpanData>();
        let Some(written) = spanned.and_then(|spanned| spanned.written) else { return };
        let SpanRecord { mut finished, begun } = *written;
        let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        finished.end = finished.start.saturating_add(took);
        if self.sender.try_send(finished).is_err() {
            self.full.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use crate::otel::propagation::context_of;

    fn layer(queue: usize) -> (Layer, mpsc::Receiver<FinishedSpan>) {
        let (sender, receiver) = mpsc::channel(queue);
        (Layer::new(sender, Counter::default(), Sampler::DEFAULT), receiver)
    }

    #[test]
    fn spans_have_their_parents_attributes_and_events() {
        let (layer, mut finished) = layer(8);
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
            let outer = tracing::info_span!(
                "outer",
                otel.kind = "server",
                traceparent = parent,
                tracestate = "a=b",
                answer = 42,
                huge = u64::MAX,
                later = tracing::field::Empty
            );
            outer.record("later", true);
            outer.record("answer", 43);
            let told = context_of(&outer).unwrap();
            outer.in_scope(|| {
                tracing::warn!(why = "said", "it {}", "failed");
                tracing::debug!("nobody asked");
                let inner = tracing::info_span!("inner", otel.status_code = "ERROR");
                assert_eq!(context_of(&inner).unwrap().trace, told.trace);
            });
        });
        let inner = finished.try_recv().unwrap();
        let outer = finished.try_recv().unwrap();
        assert_eq!((outer.kind, outer.parent), (Kind::Server, Some(0x00f0_67aa_0ba9_02b7)));
        assert!(outer.remote && !inner.remote);
        assert_eq!(outer.state, "a=b");
        assert_eq!(inner.parent, Some(outer.span));
        assert_eq!((inner.code, outer.code), (Status::Error, Status::Unset));
        assert_eq!(
            outer.attributes,
            [
                ("answer", Value::Integer(43)),
                ("huge", Value::Text(u64::MAX.to_string())),
                ("later", Value::Truth(true)),
            ]
        );
        let [event] = &outer.events[..] else { panic!("{:?}", outer.events) };
        assert_eq!(event.name, "it failed");
        let text = |text: &str| Value::Text(text.to_owned());
        assert_eq!(event.attributes, [("level", text("WARN")), ("why", text("said"))]);
        assert!(inner.start >= outer.start && outer.end >= outer.start);
    }

    #[test]
    fn spans_without_room_are_counted_and_unsampled_ones_are_not_written() {
        let (layer, mut finished) = layer(1);
        let full = layer.full.clone();
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            for _ in 0..3 {
                drop(tracing::info_span!("one"));
            }
            assert_eq!(full.get(), 2);
            assert!(finished.try_recv().is_ok());
            let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
            let span = tracing::info_span!("two", traceparent = parent);
            // The callee learns that the trace continues and is not kept.
            assert!(context_of(&span).unwrap().text().ends_with("-00"));
            drop(span);
            assert!(finished.try_recv().is_err());
            let span = tracing::info_span!("three");
            for _ in 0..MAX_ATTRIBUTES + 2 {
                span.in_scope(|| tracing::info!("event"));
            }
            drop(span);
            let three = finished.try_recv().unwrap();
            assert_eq!((three.events.len(), three.dropped_events), (MAX_ATTRIBUTES, 2));
        });
    }
}
