//! An audit log whose file takes no bytes.

use std::fs::OpenOptions;
use std::io::Read;

use crate::access::configure;
use crate::common::{built, get, run, scratch, serve};
use crate::sandbox::Client;
use afresh_serve::AuditConfig;
use reqwest::Method;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::json;

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
