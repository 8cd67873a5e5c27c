//! Lines of the audit log, and a log whose file takes no bytes.

use std::fs::OpenOptions;
use std::io::Read;
use std::time::Duration;

use crate::access::configure;
use crate::common::{TEST_TIMEOUT, built, get, run, scratch, serve};
use crate::sandbox::{Client, path};
use afresh_serve::AuditConfig;
use reqwest::Method;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

/// Bytes that a pipe holds by default.
const PIPE_BYTES: usize = 64 << 10;
/// A line has more bytes than this.
const MIN_LINE_BYTES: usize = 200;

#[test]
fn a_pipe_that_is_not_read_stops_neither_requests_nor_the_end() {
    let Some(script) = built("quickjs.wasm") else { return };
    for required in [false, true] {
        let dir = scratch();
        run(async {
            let file = dir.path().join("audit.pipe");
            mknodat(CWD, &file, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            // Both ends, since an end alone waits for the other one.
            let mut reader = OpenOptions::new().read(true).write(true).open(&file).unwrap();
            let mut config = configure(dir.path(), &script);
            let mut audit = AuditConfig::new(&file);
            audit.required = required;
            config.audit = Some(audit);
            let server = serve(config.clone()).await;
            let client = Client::of(&server);
            // Denied requests have a line, and wait for none.
            let stranger = Client::with_key(&server, "nonsense");
            for _ in 0..2 * PIPE_BYTES / MIN_LINE_BYTES {
                let asked = stranger.ask(Method::GET, "/sandboxes/missing", json!({})).await;
                assert_eq!(asked.0, 401);
            }
            assert_eq!(get(&client.http, &server.url("/healthz")).await.0, 200);
            let expected = if required { 503 } else { 404 };
            let (status, answer) = client.ask(Method::GET, "/sandboxes/missing", json!({})).await;
            assert_eq!(status, expected, "{answer}");
            server.handle.reload(&config).await.unwrap();
            let metrics = client.http.get(server.url("/metrics")).bearer_auth("key-metrics");
            let metrics = metrics.send().await.unwrap().text().await.unwrap();
            let failures = format!("afresh_audit_failures_total {}\n", u8::from(required));
            assert!(metrics.contains(&failures), "{metrics}");
            server.end().await;
            let mut line = [0; MIN_LINE_BYTES];
            reader.read_exact(&mut line).unwrap();
            assert!(line.starts_with(b"{\""));
        });
    }
}

#[test]
fn a_request_whose_client_left_before_an_answer_has_no_status() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let file = dir.path().join("audit");
        let mut config = configure(dir.path(), &script);
        config.audit = Some(AuditConfig::new(&file));
        let server = serve(config).await;
        let client = Client::of(&server);
        let own = client.create().await;
        let busy = client.begin(&own, "console.log('begun'); while (true);").await;
        // It waits for the other.
        let waits = client.begin(&own, "1");
        assert!(tokio::time::timeout(Duration::from_millis(300), waits).await.is_err());
        let find = async || {
            let text = std::fs::read_to_string(&file).unwrap();
            let mut lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            lines.find(|line| line["action"] == "POST /execute")
        };
        let recorded = async {
            loop {
                if let Some(line) = find().await {
                    return line;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let line = tokio::time::timeout(TEST_TIMEOUT, recorded).await.expect("it has a line");
        assert_eq!((&line["result"], &line["status"]), (&json!("aborted"), &Value::Null), "{line}");
        assert_eq!(client.ask(Method::DELETE, &path(&own, ""), json!({})).await.0, 204);
        drop(busy);
        server.end().await;
    });
}
