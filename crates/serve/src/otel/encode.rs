//! Finished spans as OTLP's JSON: ids in hex, enumerations as numbers, numbers of 64 bits as text.

use serde_json::{Map, Value as Json, json};

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Text(String),
    Integer(i64),
    Real(f64),
    Truth(bool),
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// On which side of a call a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Internal = 1,
    Server = 2,
    Client = 3,
    Producer = 4,
    Consumer = 5,
}

impl Kind {
    pub(super) fn named(name: &str) -> Option<Self> {
        let all = [
            ("internal", Self::Internal),
            ("server", Self::Server),
            ("client", Self::Client),
            ("producer", Self::Producer),
            ("consumer", Self::Consumer),
        ];
        all.into_iter().find(|(other, _)| name.eq_ignore_ascii_case(other)).map(|(_, kind)| kind)
    }
}

/// The outcome of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Unset = 0,
    Fine = 1,
    Error = 2,
}

impl Status {
    pub(super) fn named(name: &str) -> Option<Self> {
        let all = [("ok", Self::Fine), ("error", Self::Error)];
        all.into_iter().find(|(other, _)| name.eq_ignore_ascii_case(other)).map(|(_, code)| code)
    }
}

pub(super) type Attribute = (&'static str, Value);

/// Something that happened within a span.
#[derive(Clone, Debug)]
pub(super) struct SpanEvent {
    pub(super) time: u64,
    pub(super) name: String,
    pub(super) attributes: Vec<Attribute>,
    pub(super) dropped: u32,
}

/// A span that is over.
#[derive(Clone, Debug)]
pub(super) struct FinishedSpan {
    pub(super) trace: u128,
    pub(super) span: u64,
    pub(super) parent: Option<u64>,
    /// Whether the parent is in another process.
    pub(super) remote: bool,
    /// The value of `tracestate`.
    pub(super) state: String,
    pub(super) name: String,
    pub(super) kind: Kind,
    /// In nanoseconds since 1970.
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) attributes: Vec<Attribute>,
    pub(super) dropped_attributes: u32,
    pub(super) events: Vec<SpanEvent>,
    pub(super) dropped_events: u32,
    pub(super) code: Status,
    pub(super) description: String,
}

/// Flags of a span: it is known whether its parent is in another process, and that it is.
const HAS_REMOTE_FLAG: u32 = 0x100;
const REMOTE: u32 = 0x200;
/// The flag that W3C has for a trace that is kept.
const SAMPLED: u32 = 1;

fn attribute(name: &str, value: &Value) -> Json {
    let value = match value {
        Value::Text(text) => json!({"stringValue": text}),
        Value::Integer(number) => json!({"intValue": number.to_string()}),
        Value::Real(number) if number.is_finite() => json!({"doubleValue": number}),
        // As in protobuf's JSON for values without a JSON number.
        Value::Real(number) if number.is_nan() => json!({"doubleValue": "NaN"}),
        Value::Real(number) if *number > 0.0 => json!({"doubleValue": "Infinity"}),
        Value::Real(_) => json!({"doubleValue": "-Infinity"}),
        Value::Truth(truth) => json!({"boolValue": truth}),
    };
    json!({"key": name, "value": value})
}

fn attributes(all: &[Attribute]) -> Json {
    all.iter().map(|(name, value)| attribute(name, value)).collect()
}

fn mark(mark: &SpanEvent) -> Json {
    let mut json = json!({
        "timeUnixNano": mark.time.to_string(),
        "name": mark.name,
        "attributes": attributes(&mark.attributes),
    });
    if mark.dropped > 0 {
        json["droppedAttributesCount"] = mark.dropped.into();
    }
    json
}

fn span(span: &FinishedSpan) -> Json {
    let remote = if span.remote { REMOTE } else { 0 };
    let mut json = Map::new();
    json.insert("traceId".into(), format!("{:032x}", span.trace).into());
    json.insert("spanId".into(), format!("{:016x}", span.span).into());
    if let Some(parent) = span.parent {
        json.insert("parentSpanId".into(), format!("{parent:016x}").into());
    }
    if !span.state.is_empty() {
        json.insert("traceState".into(), span.state.as_str().into());
    }
    json.insert("flags".into(), (SAMPLED | HAS_REMOTE_FLAG | remote).into());
    json.insert("name".into(), span.name.as_str().into());
    json.insert("kind".into(), (span.kind as u8).into());
    json.insert("startTimeUnixNano".into(), span.start.to_string().into());
    json.insert("endTimeUnixNano".into(), span.end.to_string().into());
    json.insert("attributes".into(), attributes(&span.attributes));
    if span.dropped_attributes > 0 {
        json.insert("droppedAttributesCount".into(), span.dropped_attributes.into());
    }
    json.insert("events".into(), span.events.iter().map(mark).collect());
    if span.dropped_events > 0 {
        json.insert("droppedEventsCount".into(), span.dropped_events.into());
    }
    let mut status = json!({"code": span.code as u8});
    if !span.description.is_empty() {
        status["message"] = span.description.as_str().into();
    }
    json.insert("status".into(), status);
    Json::Object(json)
}

/// A request to export these spans of the process that `resource` describes.
pub(super) fn request(resource: &[(String, String)], spans: &[FinishedSpan]) -> Vec<u8> {
    let about = resource.iter();
    let about: Json =
        about.map(|(name, value)| attribute(name, &Value::Text(value.clone()))).collect();
    let spans: Json = spans.iter().map(span).collect();
    let scope = json!({"name": "afresh-serve", "version": env!("CARGO_PKG_VERSION")});
    let json = json!({
        "resourceSpans": [{
            "resource": {"attributes": about},
            "scopeSpans": [{"scope": scope, "spans": spans}],
        }]
    });
    json.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The specification's own example of JSON, field by field.
    #[test]
    fn a_span_is_written_as_the_specification_has_it() {
        let event = SpanEvent {
            time: 1_544_712_660_500_000_000,
            name: "said".to_owned(),
            attributes: vec![("n", Value::Integer(i64::MIN))],
            dropped: 1,
        };
        let finished = FinishedSpan {
            trace: 0x5b8e_fff7_9803_8103_d269_b633_813f_c60c,
            span: 0xeee1_9b7e_c3c1_b174,
            parent: Some(0xeee1_9b7e_c3c1_b173),
            remote: true,
            state: "a=b".to_owned(),
            name: "I'm a server span".to_owned(),
            kind: Kind::Server,
            start: 1_544_712_660_000_000_000,
            end: 1_544_712_661_000_000_000,
            attributes: vec![
                ("my.span.attr", Value::Text("some value".to_owned())),
                ("real", Value::Real(0.5)),
                ("none", Value::Real(f64::NAN)),
                ("truth", Value::Truth(false)),
            ],
            dropped_attributes: 0,
            events: vec![event],
            dropped_events: 2,
            code: Status::Error,
            description: "no".to_owned(),
        };
        let resource = [("service.name".to_owned(), "my.service".to_owned())];
        let written: Json = serde_json::from_slice(&request(&resource, &[finished])).unwrap();
        let expected = json!({"resourceSpans": [{
            "resource": {"attributes": [
                {"key": "service.name", "value": {"stringValue": "my.service"}}
            ]},
            "scopeSpans": [{
                "scope": {"name": "afresh-serve", "version": env!("CARGO_PKG_VERSION")},
                "spans": [{
                    "traceId": "5b8efff798038103d269b633813fc60c",
                    "spanId": "eee19b7ec3c1b174",
                    "parentSpanId": "eee19b7ec3c1b173",
                    "traceState": "a=b",
                    "flags": 769,
                    "name": "I'm a server span",
                    "kind": 2,
                    "startTimeUnixNano": "1544712660000000000",
                    "endTimeUnixNano": "1544712661000000000",
                    "attributes": [
                        {"key": "my.span.attr", "value": {"stringValue": "some value"}},
                        {"key": "real", "value": {"doubleValue": 0.5}},
                        {"key": "none", "value": {"doubleValue": "NaN"}},
                        {"key": "truth", "value": {"boolValue": false}},
                    ],
                    "events": [{
                        "timeUnixNano": "1544712660500000000",
                        "name": "said",
                        "attributes": [
                            {"key": "n", "value": {"intValue": "-9223372036854775808"}}
                        ],
                        "droppedAttributesCount": 1,
                    }],
                    "droppedEventsCount": 2,
                    "status": {"code": 2, "message": "no"},
                }],
            }],
        }]});
        assert_eq!(written, expected);
    }
}
