//! Finished spans on their way to a collector, in batches, as OTLP over HTTP.
//!
//! Promises: spans that a collector asks to retry are sent again, later each time, and dropped in
//! the end; refused ones are not. Every span is counted, sent or not. A collector may be hostile:
//! only the useful part of its answer is read, redirects are not followed, and the settings limit
//! the wait for it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout_at};

use super::Counts;
use super::encode::{self, FinishedSpan};
use super::settings::{Settings, SettingsError};
use crate::failure::describe;

/// Maximum attempts for a batch.
const MAX_ATTEMPTS: u32 = 5;
/// Before the second try; twice that before each further one.
const FIRST: Duration = Duration::from_secs(1);
/// Maximum pause that a collector may request.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);
/// Maximum bytes of an answer that are read.
const ANSWER: usize = 64 << 10;

/// A sender with these settings.
pub(super) fn client(settings: &Settings) -> Result<Client, SettingsError> {
    let builder = Client::builder()
        .timeout(settings.timeout)
        .default_headers(settings.headers.clone())
        .user_agent(concat!("afresh/", env!("CARGO_PKG_VERSION")))
        // Its headers may have secrets.
        .redirect(reqwest::redirect::Policy::none())
        .pool_max_idle_per_host(1);
    builder.build().map_err(SettingsError::Client)
}

/// The sender.
pub(super) struct Sender {
    settings: Arc<Settings>,
    client: Client,
    counts: Counts,
    /// Whether the log has a line that the collector is away.
    away: bool,
}

/// The outcome of one try.
enum ExportResult {
    /// It was taken, except for this many spans.
    Taken(u64),
    /// It will not be taken, for this reason.
    Refused(String),
    /// It may be taken later, perhaps after the collector's delay.
    Later(String, Option<Duration>),
}

impl Sender {
    pub(super) fn new(settings: Arc<Settings>, client: Client, counts: Counts) -> Self {
        Self { settings, client, counts, away: false }
    }

    /// Sends spans until it is stopped, and then once the rest.
    pub(super) async fn run(
        mut self,
        mut queue: mpsc::Receiver<FinishedSpan>,
        mut ending: oneshot::Receiver<()>,
    ) {
        let most = self.settings.batch;
        let mut batch = Vec::new();
        let mut ended = false;
        while !ended {
            tokio::select! {
                count = queue.recv_many(&mut batch, most) => if count == 0 { break },
                _ = &mut ending => break,
            }
            let due = Instant::now() + self.settings.delay;
            while batch.len() < most && !ended {
                let room = most - batch.len();
                tokio::select! {
                    more = timeout_at(due, queue.recv_many(&mut batch, room)) => match more {
                        Ok(0) | Err(_) => break,
                        Ok(_) => {}
                    },
                    _ = &mut ending => ended = true,
                }
            }
            let sending = self.send(&batch, ended);
            if ended {
                sending.await;
            } else {
                tokio::select! {
                    () = sending => {}
                    _ = &mut ending => {
                        ended = true;
                        self.send(&batch, true).await;
                    }
                }
            }
            batch.clear();
        }
        queue.close();
        while queue.recv_many(&mut batch, most).await > 0 {
            self.send(&batch, true).await;
            batch.clear();
        }
    }

    /// Sends a batch, more than once if need be and it is not the last.
    async fn send(&mut self, batch: &[FinishedSpan], last: bool) {
        let spans = batch.len() as u64;
        let body = Bytes::from(encode::request(&self.settings.resource, batch));
        let mut pause = FIRST;
        for number in 1..=MAX_ATTEMPTS {
            match self.send_batch(body.clone()).await {
                ExportResult::Taken(refused) => {
                    let refused = refused.min(spans);
                    self.counts.exported.inc_by(spans - refused);
                    self.counts.refused.inc_by(refused);
                    if std::mem::take(&mut self.away) {
                        tracing::warn!(
                            collector = self.settings.redacted_endpoint(),
                            "traces are taken again"
                        );
                    }
                    return;
                }
                ExportResult::Refused(why) => {
                    self.counts.refused.inc_by(spans);
                    self.log_failure(&why);
                    return;
                }
                ExportResult::Later(why, after) => {
                    self.log_failure(&why);
                    if last || number == MAX_ATTEMPTS {
                        break;
                    }
                    sleep(after.unwrap_or(pause).min(MAX_RETRY_AFTER)).await;
                    pause *= 2;
                }
            }
        }
        self.counts.unreachable.inc_by(spans);
    }

    /// Says once that a collector takes nothing.
    fn log_failure(&mut self, why: &str) {
        if !std::mem::replace(&mut self.away, true) {
            let collector = self.settings.redacted_endpoint();
            tracing::warn!(collector, why, "traces are not accepted; lost ones are counted");
        }
    }

    async fn send_batch(&self, body: Bytes) -> ExportResult {
        let request = self.client.post(self.settings.endpoint.clone());
        let json = HeaderValue::from_static("application/json");
        let answer = request.header(CONTENT_TYPE, json).body(body).send().await;
        let answer = match answer {
            Ok(answer) => answer,
            // The address may have a key in it.
            Err(error) => return ExportResult::Later(describe(&error.without_url()), None),
        };
        let status = answer.status();
        let after = answer.headers().get(RETRY_AFTER).and_then(|after| after.to_str().ok());
        let after = after.and_then(|after| after.parse().ok()).map(Duration::from_secs);
        match status {
            status if status.is_success() => ExportResult::Taken(refused(answer).await),
            StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT => {
                ExportResult::Later(format!("it answers {status}"), after)
            }
            status => ExportResult::Refused(format!("it answers {status}")),
        }
    }
}

/// The number of spans that a collector refused while it took the others.
async fn refused(mut answer: Response) -> u64 {
    let mut body = Vec::new();
    while let Ok(Some(piece)) = answer.chunk().await {
        if body.len() + piece.len() > ANSWER {
            return 0;
        }
        body.extend_from_slice(&piece);
    }
    let said: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let refused = &said["partialSuccess"]["rejectedSpans"];
    // A number of 64 bits, which is text in protobuf's JSON; readers take both.
    let number = refused.as_str().and_then(|text| text.parse().ok());
    number.or_else(|| refused.as_u64()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::Router;
    use axum::extract::State;
    use axum::response::IntoResponse;
    use axum::routing::post;

    use super::*;
    use crate::otel::Traces;

    /// The collector's answers to requests, the last one for all further requests.
    type Script = Arc<(Vec<(u16, &'static str)>, AtomicUsize)>;

    async fn collector(script: Vec<(u16, &'static str)>) -> (String, Script) {
        async fn answer(State(script): State<Script>) -> impl IntoResponse {
            let number = script.1.fetch_add(1, Ordering::Relaxed);
            let (status, body) = script.0[number.min(script.0.len() - 1)];
            (StatusCode::from_u16(status).unwrap(), [("retry-after", "0")], body)
        }
        let script: Script = Arc::new((script, AtomicUsize::new(0)));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let routes = Router::new().route("/v1/traces", post(answer)).with_state(script.clone());
        let routes = hyper_util::service::TowerToHyperService::new(routes);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let stream = hyper_util::rt::TokioIo::new(stream);
                let serving = hyper::server::conn::http1::Builder::new();
                tokio::spawn(serving.serve_connection(stream, routes.clone()));
            }
        });
        (format!("http://{addr}"), script)
    }

    fn settings(endpoint: &str, more: &[(&str, &str)]) -> Settings {
        let get = |name: &str| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some(endpoint.to_owned()),
            name => {
                let found = more.iter().find(|(other, _)| *other == name);
                found.map(|(_, value)| (*value).to_owned())
            }
        };
        Settings::read(get).unwrap().unwrap()
    }

    fn span(number: u64) -> FinishedSpan {
        FinishedSpan {
            trace: 1,
            span: number + 1,
            parent: None,
            remote: false,
            state: String::new(),
            name: "span".to_owned(),
            kind: encode::Kind::Internal,
            start: 1,
            end: 2,
            attributes: Vec::new(),
            dropped_attributes: 0,
            events: Vec::new(),
            dropped_events: 0,
            code: encode::Status::Unset,
            description: String::new(),
        }
    }

    /// Counts of spans: exported, refused, unreachable.
    async fn became(settings: Settings, spans: u64) -> [u64; 3] {
        let traces = Traces::new(settings);
        let counts = traces.counts.clone();
        for number in 0..spans {
            traces.sender.try_send(span(number)).unwrap();
        }
        let sending = traces.begin().unwrap();
        let counted = || {
            [&counts.exported, &counts.refused, &counts.unreachable].map(|counter| counter.get())
        };
        let begun = Instant::now();
        while counted().iter().sum::<u64>() < spans && begun.elapsed() < MAX_RETRY_AFTER {
            sleep(Duration::from_millis(5)).await;
        }
        sending.end().await;
        counted()
    }

    #[tokio::test]
    async fn what_a_collector_asks_for_again_is_sent_again_and_what_it_refuses_is_not() {
        let now = [("OTEL_BSP_SCHEDULE_DELAY", "0")];
        let (url, script) = collector(vec![(503, ""), (429, "no"), (200, "{}")]).await;
        assert_eq!(became(settings(&url, &now), 3).await, [3, 0, 0]);
        assert_eq!(script.1.load(Ordering::Relaxed), 3);
        let (url, script) = collector(vec![(400, "")]).await;
        assert_eq!(became(settings(&url, &now), 3).await, [0, 3, 0]);
        assert_eq!(script.1.load(Ordering::Relaxed), 1);
        let (url, script) = collector(vec![(502, "")]).await;
        assert_eq!(became(settings(&url, &now), 3).await, [0, 0, 3]);
        assert_eq!(script.1.load(Ordering::Relaxed), MAX_ATTEMPTS as usize);
        let some = r#"{"partialSuccess":{"rejectedSpans":"2","errorMessage":"no"}}"#;
        let (url, _) = collector(vec![(200, some)]).await;
        assert_eq!(became(settings(&url, &now), 3).await, [1, 2, 0]);
    }

    #[tokio::test]
    async fn batches_have_their_size_and_what_is_left_at_the_end_is_sent_once() {
        let sizes = [("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4"), ("OTEL_BSP_SCHEDULE_DELAY", "60000")];
        let (url, script) = collector(vec![(200, "{}")]).await;
        let traces = Traces::new(settings(&url, &sizes));
        let counts = traces.counts.clone();
        for number in 0..10 {
            traces.sender.try_send(span(number)).unwrap();
        }
        traces.begin().unwrap().end().await;
        assert_eq!((counts.exported.get(), script.1.load(Ordering::Relaxed)), (10, 3));
        // The collector does not listen, and the end does not wait for it.
        let traces = Traces::new(settings("http://127.0.0.1:1", &[]));
        let counts = traces.counts.clone();
        traces.sender.try_send(span(0)).unwrap();
        traces.begin().unwrap().end().await;
        assert_eq!((counts.exported.get(), counts.unreachable.get()), (0, 1));
    }
}
