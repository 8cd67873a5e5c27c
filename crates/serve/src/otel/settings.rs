//! The settings of traces, from the variables of the OpenTelemetry specification.
//!
//! Promises: a variable that is not understood is an error or a warning that names it, never
//! another value. Headers, which may contain keys, are never shown.

use std::time::Duration;

use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::sampler::Sampler;

/// Where collectors of this machine listen.
const DEFAULT_ENDPOINT: &str = "http://localhost:4318";

/// A variable with an unusable value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// Its value is unknown.
    #[error("{name} is not {expected}")]
    Value {
        /// The variable.
        name: &'static str,
        /// The allowed values.
        expected: &'static str,
    },
    /// The client to send with could not be made.
    #[error("no client for the collector: {0}")]
    Client(#[source] reqwest::Error),
}

fn invalid(name: &'static str, expected: &'static str) -> SettingsError {
    SettingsError::Value { name, expected }
}

/// How traces are exported.
#[derive(Clone)]
#[non_exhaustive]
pub struct Settings {
    pub(super) endpoint: Url,
    pub(super) headers: HeaderMap,
    pub(super) timeout: Duration,
    /// Attributes of this process: `service.name` and others.
    pub(super) resource: Vec<(String, String)>,
    pub(super) sampler: Sampler,
    /// Spans that wait.
    pub(super) queue: usize,
    /// Maximum spans of one request to the collector.
    pub(super) batch: usize,
    /// Maximum time for which a span waits for others.
    pub(super) delay: Duration,
    notes: Vec<&'static str>,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings")
            .field("endpoint", &self.redacted_endpoint())
            .finish_non_exhaustive()
    }
}

/// Text with `%41` for `A`.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, left)) = rest.split_first() {
        rest = left;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = left.get(..2).filter(|two| two.iter().all(u8::is_ascii_hexdigit))?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
        rest = &left[2..];
    }
    String::from_utf8(bytes).ok()
}

/// `name=value,name=value`, as both headers and attributes come.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let all = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        Some((name.trim().to_owned(), decoded(value.trim())?)).filter(|(name, _)| !name.is_empty())
    };
    all.map(pair).collect()
}

impl Settings {
    /// Settings that are not followed, to be logged once a log exists.
    #[must_use]
    pub fn notes(&self) -> &[&'static str] {
        &self.notes
    }

    /// The settings in the environment; `None` if traces are not requested. An endpoint requests
    /// them, or `OTEL_TRACES_EXPORTER=otlp`.
    ///
    /// # Errors
    /// [`SettingsError`], with the variable.
    pub fn from_env() -> Result<Option<Self>, SettingsError> {
        Self::read(|name| std::env::var(name).ok())
    }

    /// The same, from any source of variables.
    ///
    /// # Errors
    /// [`SettingsError`], with the variable.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, SettingsError> {
        // One that is empty is one that is not set.
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        if get("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        let base = get("OTEL_EXPORTER_OTLP_ENDPOINT");
        let own = get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
        match get("OTEL_TRACES_EXPORTER").as_deref() {
            Some("none") => return Ok(None),
            Some("otlp") => {}
            None if base.is_some() || own.is_some() => {}
            None => return Ok(None),
            Some(_) => return Err(invalid("OTEL_TRACES_EXPORTER", "`otlp` or `none`")),
        }
        let either = |name: &str| {
            let own = name.replacen("OTLP_", "OTLP_TRACES_", 1);
            get(&own).or_else(|| get(name))
        };
        let mut notes = Vec::new();
        match either("OTEL_EXPORTER_OTLP_PROTOCOL").as_deref() {
            None | Some("http/json") => {}
            // A collector takes both under one address.
            Some("http/protobuf") => notes.push(
                "OTEL_EXPORTER_OTLP_PROTOCOL: traces are sent as JSON (http/json), to the same address",
            ),
            Some(_) => {
                let expected =
                    "`http/json`: afresh sends traces over HTTP, as to port 4318 of a collector";
                return Err(invalid("OTEL_EXPORTER_OTLP_PROTOCOL", expected));
            }
        }
        if either("OTEL_EXPORTER_OTLP_COMPRESSION").is_some_and(|how| how != "none") {
            notes.push("OTEL_EXPORTER_OTLP_COMPRESSION: traces are sent as they are");
        }
        let address = "an address such as http://localhost:4318";
        let url = |name, text: &str| {
            let url = Url::parse(text).ok().filter(|url| ["http", "https"].contains(&url.scheme()));
            url.filter(Url::has_host).ok_or_else(|| invalid(name, address))
        };
        let endpoint = if let Some(own) = own {
            url("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &own)?
        } else {
            let name = "OTEL_EXPORTER_OTLP_ENDPOINT";
            let mut base = url(name, base.as_deref().unwrap_or(DEFAULT_ENDPOINT))?;
            let path = format!("{}/v1/traces", base.path().trim_end_matches('/'));
            base.set_path(&path);
            base
        };
        let mut headers = HeaderMap::new();
        let given = either("OTEL_EXPORTER_OTLP_HEADERS").unwrap_or_default();
        let expected = "headers such as `name=value,name=value`";
        let bad = || invalid("OTEL_EXPORTER_OTLP_HEADERS", expected);
        for (name, value) in pairs(&given).ok_or_else(bad)? {
            let mut value = HeaderValue::try_from(value).map_err(|_| bad())?;
            value.set_sensitive(true);
            headers.insert(HeaderName::try_from(name).map_err(|_| bad())?, value);
        }
        let number = |name: &'static str, usual: u64| match get(name) {
            Some(text) => text.trim().parse().map_err(|_| invalid(name, "a number")),
            None => Ok(usual),
        };
        let timeout = match either("OTEL_EXPORTER_OTLP_TIMEOUT").map(|text| text.parse()) {
            Some(Ok(milliseconds)) => milliseconds,
            Some(Err(_)) => {
                return Err(invalid("OTEL_EXPORTER_OTLP_TIMEOUT", "a number of milliseconds"));
            }
            None => 10_000,
        };
        let queue = number("OTEL_BSP_MAX_QUEUE_SIZE", 2048)?.clamp(1, 1 << 20) as usize;
        let batch = number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)?.clamp(1, 1 << 13) as usize;
        let delay = number("OTEL_BSP_SCHEDULE_DELAY", 5000)?.min(60_000);
        let sampler = match get("OTEL_TRACES_SAMPLER") {
            Some(name) => {
                let argument = get("OTEL_TRACES_SAMPLER_ARG");
                let expected = "a sampler that is known: always_on, always_off, traceidratio, each with parentbased_ or without";
                let sampler = Sampler::named(&name, argument.as_deref());
                sampler.ok_or_else(|| invalid("OTEL_TRACES_SAMPLER", expected))?
            }
            None => Sampler::DEFAULT,
        };
        Ok(Some(Self {
            endpoint,
            headers,
            timeout: Duration::from_millis(timeout),
            resource: resource(&get)?,
            sampler,
            queue,
            batch: batch.min(queue),
            delay: Duration::from_millis(delay),
            notes,
        }))
    }

    /// The endpoint without a password.
    pub(super) fn redacted_endpoint(&self) -> String {
        let mut shown = self.endpoint.clone();
        // An address with a host has room for both.
        let _ = shown.set_username("");
        let _ = shown.set_password(None);
        shown.set_query(None);
        shown.to_string()
    }
}

/// Attributes of this process.
fn resource(get: &impl Fn(&str) -> Option<String>) -> Result<Vec<(String, String)>, SettingsError> {
    let name = "OTEL_RESOURCE_ATTRIBUTES";
    let expected = "attributes such as `name=value,name=value`";
    let given = get(name).unwrap_or_default();
    let mut given = pairs(&given).ok_or_else(|| invalid(name, expected))?;
    if let Some(service) = get("OTEL_SERVICE_NAME") {
        given.retain(|(name, _)| name != "service.name");
        given.push(("service.name".to_owned(), service));
    }
    let version = env!("CARGO_PKG_VERSION");
    let usual = [
        ("service.name", "afresh"),
        ("service.version", version),
        ("telemetry.sdk.name", "afresh"),
        ("telemetry.sdk.language", "rust"),
        ("telemetry.sdk.version", version),
    ];
    for (name, value) in usual {
        if !given.iter().any(|(other, _)| other == name) {
            given.push((name.to_owned(), value.to_owned()));
        }
    }
    Ok(given)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Settings>, SettingsError> {
        let value = |name: &str| variables.iter().find(|(other, _)| *other == name);
        Settings::read(|name| value(name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn traces_are_sent_where_the_environment_says_and_only_if_it_does() {
        let endpoint = |variables: &[_]| read(variables).unwrap().map(|s| s.endpoint.to_string());
        assert_eq!(endpoint(&[]), None);
        assert_eq!(endpoint(&[("OTEL_SERVICE_NAME", "x")]), None);
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318/under/");
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://c/as-it-is");
        assert_eq!(endpoint(&[base]).as_deref(), Some("http://c:4318/under/v1/traces"));
        assert_eq!(endpoint(&[base, own]).as_deref(), Some("https://c/as-it-is"));
        let usual = endpoint(&[("OTEL_TRACES_EXPORTER", "otlp")]);
        assert_eq!(usual.as_deref(), Some("http://localhost:4318/v1/traces"));
        assert_eq!(endpoint(&[base, ("OTEL_TRACES_EXPORTER", "none")]), None);
        assert_eq!(endpoint(&[base, ("OTEL_SDK_DISABLED", "True")]), None);
        assert_eq!(endpoint(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "")]), None);
    }

    #[test]
    fn invalid_settings_are_named_without_their_values() {
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318");
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_HEADERS", "sesame"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=sesame%0a"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a b=sesame"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=%sesame"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "sesame"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "sesame"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "sesame"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "file:///sesame"),
            ("OTEL_TRACES_EXPORTER", "sesame"),
            ("OTEL_TRACES_SAMPLER", "sesame"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "sesame"),
            ("OTEL_RESOURCE_ATTRIBUTES", "sesame"),
        ] {
            let error = read(&[base, (name, value)]).unwrap_err().to_string();
            assert!(error.starts_with(name) && !error.contains("sesame"), "{error}");
        }
    }

    #[test]
    fn ignored_settings_are_noted() {
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318");
        let notes = |more| read(&[base, more]).unwrap().unwrap().notes().join("\n");
        assert_eq!(notes(("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")), "");
        assert!(notes(("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")).contains("http/json"));
        assert!(notes(("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")).contains("COMPRESSION"));
        assert!(read(&[base, ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]).is_err());
    }

    #[test]
    fn headers_are_decoded_and_never_printed() {
        let settings = read(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:sesame@c:4318/?key=sesame"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20sesame, x-a = b"),
            ("OTEL_SERVICE_NAME", "shop"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=other,deployment.environment.name=a%2Cb"),
        ]);
        let settings = settings.unwrap().unwrap();
        assert_eq!(settings.headers["authorization"], "Bearer sesame");
        assert_eq!(settings.headers["x-a"], "b");
        assert!(!format!("{settings:?} {:?}", settings.headers).contains("sesame"));
        assert!(!settings.redacted_endpoint().contains("sesame"));
        let of = |name: &str| settings.resource.iter().find(|(other, _)| other == name);
        assert_eq!(of("service.name").unwrap().1, "shop");
        assert_eq!(of("deployment.environment.name").unwrap().1, "a,b");
        assert_eq!(settings.resource.iter().filter(|(n, _)| n == "service.name").count(), 1);
    }
}
