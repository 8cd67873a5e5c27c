//! Scopes of keys at every route, and the audit log of a real server.

use std::path::Path;

use crate::common::{Running, built, client, get, run, scratch, serve};
use crate::sandbox::{Client, KEY, path, sandboxes, with};
use afresh_serve::{AuditConfig, Config, GuestConfig, Keys};
use reqwest::Method;
use serde_json::{Value, json};

/// The proof that a route needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    Nothing,
    Use,
    UseOrAdmin,
    MetricsOrAdmin,
    /// A sandbox's token, and no key.
    Token,
}

/// Every route, with a method that it answers.
const ROUTES: [(&str, &str, Needs); 49] = [
    ("POST", "/sandboxes", Needs::Use),
    ("GET", "/v2/sandboxes", Needs::Use),
    ("GET", "/sandboxes/{id}", Needs::Use),
    ("DELETE", "/sandboxes/{id}", Needs::Use),
    ("POST", "/sandboxes/{id}/timeout", Needs::Use),
    ("POST", "/sandboxes/{id}/refreshes", Needs::Use),
    ("PUT", "/sandboxes/{id}/network", Needs::Use),
    ("POST", "/sandboxes/{id}/pause", Needs::Use),
    ("POST", "/sandboxes/{id}/connect", Needs::Use),
    ("POST", "/v2/sandboxes/{id}/connect", Needs::Use),
    ("POST", "/sandboxes/{id}/resume", Needs::Use),
    ("POST", "/sandboxes/{id}/fork", Needs::Use),
    ("POST", "/sandboxes/{id}/snapshots", Needs::Use),
    ("GET", "/sandboxes/{id}/metrics", Needs::Use),
    ("GET", "/snapshots", Needs::Use),
    ("POST", "/v3/templates", Needs::Use),
    ("GET", "/templates", Needs::Use),
    ("GET", "/v2/templates", Needs::Use),
    ("GET", "/templates/{id}", Needs::Use),
    ("DELETE", "/templates/{id}", Needs::Use),
    ("POST", "/v2/templates/{id}/builds/{build}", Needs::Use),
    ("GET", "/templates/{id}/builds/{build}/status", Needs::Use),
    ("GET", "/templates/{id}/files/{files}", Needs::Use),
    // It needs the token of its link, and no key.
    ("PUT", "/templates/{id}/files/{files}", Needs::Nothing),
    ("GET", "/templates/aliases/{id}", Needs::Use),
    ("GET", "/templates/{id}/tags", Needs::Use),
    ("POST", "/templates/tags", Needs::Use),
    ("DELETE", "/templates/tags", Needs::Use),
    ("POST", "/sandboxes/{id}/checkpoints", Needs::Use),
    ("DELETE", "/sandboxes/{id}/checkpoints/{checkpoint}", Needs::Use),
    ("POST", "/sandboxes/{id}/rollback", Needs::Use),
    ("GET", "/sandboxes/{id}/tree", Needs::Use),
    ("GET", "/sandboxes/{id}/diff", Needs::Use),
    ("GET", "/usage", Needs::UseOrAdmin),
    ("GET", "/openapi.json", Needs::Nothing),
    ("GET", "/health", Needs::Token),
    ("POST", "/execute", Needs::Token),
    ("GET", "/contexts", Needs::Token),
    ("DELETE", "/contexts/{id}", Needs::Token),
    ("POST", "/contexts/{id}/restart", Needs::Token),
    ("GET", "/files", Needs::Token),
    ("POST", "/filesystem.Filesystem/{method}", Needs::Token),
    ("POST", "/process.Process/{method}", Needs::Token),
    ("GET", "/healthz", Needs::Nothing),
    ("GET", "/readyz", Needs::Nothing),
    ("GET", "/status", Needs::MetricsOrAdmin),
    ("GET", "/status.json", Needs::MetricsOrAdmin),
    ("GET", "/status/pages.json", Needs::MetricsOrAdmin),
    ("GET", "/metrics", Needs::MetricsOrAdmin),
];

/// Keys, each with one scope. The tenant of all has the sandboxes.
const KEYS: [(&str, &str); 3] =
    [("key-of-acme", "use"), ("key-admin", "admin"), ("key-metrics", "metrics")];

pub(crate) fn configure(dir: &Path, script: &str) -> Config {
    let file = dir.join("keys");
    let lines = KEYS.map(|(key, scope)| format!("acme {key} scopes={scope} id={scope}-1\n"));
    std::fs::write(&file, lines.concat()).unwrap();
    let mut sandboxes = sandboxes(&dir.join("store"), script);
    sandboxes.keys = Keys::read(&file).unwrap();
    sandboxes.requires_metrics_key = true;
    with(sandboxes)
}

#[test]
fn every_route_of_the_source_is_in_the_table() {
    let source = include_str!("../../src/sandbox/http/routes.rs");
    let routes = source.split(".route(\"").skip(1);
    let operations = include_str!("../../src/service.rs").split("const OPERATIONS").nth(1).unwrap();
    let operations = operations.split(';').nth(1).unwrap().split('"').skip(1).step_by(2);
    let mut found = Vec::new();
    for path in routes.map(|text| text.split('"').next().unwrap()).chain(operations) {
        assert!(ROUTES.iter().any(|(_, known, _)| *known == path), "{path} is not in the table");
        found.push(path);
    }
    for (_, path, _) in ROUTES {
        assert!(found.contains(&path), "{path} is in no source");
    }
}

async fn status_of(
    server: &Running,
    (method, path): (&str, &str),
    sandbox: &str,
    key: Option<&str>,
) -> u16 {
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    let mut target = path.replace("{checkpoint}", "none").replace("{method}", "Nothing");
    // A sandbox that is not there: nothing changes, and the answer shows whether the key was
    // enough.
    target = target.replace("{id}", "missing");
    let mut request = client().request(method, server.url(&target)).body("{}");
    if ROUTES.iter().any(|(_, known, needs)| *known == path && *needs == Needs::Token) {
        request = request.header("e2b-sandbox-id", sandbox);
    }
    if let Some(key) = key {
        request = request.header("x-api-key", key);
    }
    request.send().await.unwrap().status().as_u16()
}

#[test]
fn every_route_asks_for_its_scope() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let server = serve(configure(dir.path(), &script)).await;
        let sandbox = Client::of(&server).create().await;
        let id = sandbox["sandboxID"].as_str().unwrap();
        for (method, path, needs) in ROUTES {
            for (key, scope) in KEYS {
                let enough = match needs {
                    Needs::Nothing => true,
                    Needs::Use => scope == "use",
                    Needs::UseOrAdmin => scope != "metrics",
                    Needs::MetricsOrAdmin => scope != "use",
                    Needs::Token => false,
                };
                let status = status_of(&server, (method, path), id, Some(key)).await;
                let denied = if needs == Needs::Token { 401 } else { 403 };
                assert_eq!(status != denied, enough, "{method} {path} with {scope}: {status}");
                assert!(enough || status == denied, "{method} {path} with {scope}: {status}");
            }
            for key in [None, Some("nonsense")] {
                let status = status_of(&server, (method, path), id, key).await;
                assert_eq!(status == 401, needs != Needs::Nothing, "{method} {path}: {status}");
            }
        }
        server.end().await;
    });
}

/// The lines of a log.
fn lines(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn operations_are_in_the_audit_log_without_code_and_secrets() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let file = dir.path().join("audit.log");
        let mut config = configure(dir.path(), &script);
        config.audit = Some(AuditConfig::new(&file));
        let server = serve(config.clone()).await;
        let client = Client::of(&server);
        let own = client.create().await;
        let id = own["sandboxID"].as_str().unwrap();
        client.value(&own, "'a secret in code' + 1").await;
        let read = client.http.get(server.url("/files?path=/a-secret-path"));
        let read = read.header("e2b-sandbox-id", id).header("x-access-token", "wrong");
        assert_eq!(read.send().await.unwrap().status(), 401);
        let denied = Client::with_key(&server, "key-metrics");
        assert_eq!(denied.ask(Method::GET, &path(&own, ""), json!({})).await.0, 403);
        // The log has the id that the handler has.
        let encoded = format!("/sandboxes/%{:02x}{}", id.as_bytes()[0], &id[1..]);
        assert_eq!(client.ask(Method::GET, &encoded, json!({})).await.0, 200);
        // As logrotate does.
        let rotated = dir.path().join("audit.log.1");
        std::fs::rename(&file, &rotated).unwrap();
        server.handle.reload(&config).await.unwrap();
        let mut broken = config.clone();
        broken.guests.push(GuestConfig::new(dir.path().join("missing.wasm").display().to_string()));
        server.handle.reload(&broken).await.unwrap_err();
        assert_eq!(client.ask(Method::DELETE, &path(&own, ""), json!({})).await.0, 204);
        server.end().await;
        let text = std::fs::read_to_string(&rotated).unwrap();
        let token = own["envdAccessToken"].as_str().unwrap();
        for secret in ["secret", KEY, "key-metrics", token, "wrong"] {
            assert!(!text.contains(secret), "{secret}: {text}");
        }
        let (before, after) = (lines(&rotated), lines(&file));
        let fields = |line: &Value| {
            ["action", "tenant", "key", "sandbox", "result", "client"]
                .map(|name| line[name].as_str().unwrap_or("-").to_owned())
        };
        let here = "127.0.0.1";
        let expected = [
            ["POST /v2/sandboxes", "acme", "use-1", "-", "ok", here],
            ["POST /execute", "acme", "token", id, "ok", here],
            ["GET /files", "acme", "token", id, "denied", here],
            ["GET /sandboxes/{id}", "acme", "metrics-1", id, "denied", here],
            ["GET /sandboxes/{id}", "acme", "use-1", id, "ok", here],
        ];
        assert_eq!(before.iter().map(fields).collect::<Vec<_>>(), expected);
        assert_eq!(before[0]["made"], json!([id]));
        for line in &before {
            assert!(line["duration_ms"].as_f64().unwrap() >= 0.0, "{line}");
            assert!(line["time"].as_str().unwrap().ends_with('Z'), "{line}");
            assert!(line["request"].is_string() && line["status"].is_u64(), "{line}");
        }
        let actions: Vec<_> = after.iter().map(|line| fields(line)[0].clone()).collect();
        assert_eq!(actions, ["reload", "reload", "DELETE /sandboxes/{id}", "shutdown"]);
        let results: Vec<_> = after.iter().map(|line| fields(line)[4].clone()).collect();
        assert_eq!(results, ["ok", "failed", "ok", "ok"]);
        assert_eq!(after[0]["key"], "server");
    });
}

#[test]
fn a_traffic_token_runs_no_code() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let server = serve(configure(dir.path(), &script)).await;
        let client = Client::of(&server);
        let own = client.create().await;
        let [id, token, traffic] = ["sandboxID", "envdAccessToken", "trafficAccessToken"]
            .map(|name| own[name].as_str().unwrap());
        assert_ne!(token, traffic);
        let ask = async |method: Method, path: &str, header: &str, token: &str| {
            let request = client.http.request(method, server.url(path));
            let request = request.header("e2b-sandbox-id", id).header(header, token);
            request.body(json!({"code": "1"}).to_string()).send().await.unwrap().status().as_u16()
        };
        for header in ["e2b-traffic-access-token", "x-access-token"] {
            assert_eq!(ask(Method::POST, "/execute", header, traffic).await, 401);
            assert_eq!(ask(Method::GET, "/files?path=/a", header, traffic).await, 401);
        }
        assert_eq!(ask(Method::POST, "/execute", "e2b-traffic-access-token", token).await, 401);
        assert_eq!(ask(Method::POST, "/execute", "x-access-token", token).await, 200);
        // Clients of E2B show no other token here.
        assert_eq!(ask(Method::GET, "/contexts", "e2b-traffic-access-token", traffic).await, 200);
        server.end().await;
    });
}

#[test]
fn a_required_log_refuses_calls_and_a_directory_that_fails_is_reported() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let file = dir.path().join("audit.log");
        let mut config = configure(dir.path(), &script);
        let mut audit = AuditConfig::new(&file);
        audit.required = true;
        config.audit = Some(audit);
        // The probe of the directory cannot write its file.
        let probe = dir.path().join("store/probe");
        std::fs::create_dir_all(&probe).unwrap();
        let server = serve(config.clone()).await;
        let client = Client::of(&server);
        wait_for_directory(&server, false).await;
        let own = client.create().await;
        assert_eq!(client.value(&own, "6 * 7").await, "42");
        std::fs::remove_dir(&probe).unwrap();
        let events: Vec<_> = lines(&file).iter().map(|line| line["event"].clone()).collect();
        assert_eq!(events, ["begin", "end", "begin", "end"]);
        // Each write to this device fails as on a full disk.
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/dev/full", &file).unwrap();
        server.handle.reload(&config).await.unwrap();
        let (status, answer) = client.ask(Method::GET, &path(&own, ""), json!({})).await;
        assert_eq!(status, 503, "{answer}");
        assert!(answer["message"].as_str().unwrap().contains("audit log"), "{answer}");
        let metrics = client.http.get(server.url("/metrics")).bearer_auth("key-metrics");
        let metrics = metrics.send().await.unwrap().text().await.unwrap();
        assert!(!metrics.contains("afresh_audit_failures_total 0"), "{metrics}");
        std::fs::remove_file(&file).unwrap();
        server.handle.reload(&config).await.unwrap();
        assert_eq!(client.ask(Method::GET, &path(&own, ""), json!({})).await.0, 200);
        wait_for_directory(&server, true).await;
        server.end().await;
    });
}

/// Waits until the server reports its directory as healthy or not. It is ready all the time.
async fn wait_for_directory(server: &Running, is_healthy: bool) {
    let http = client();
    loop {
        let (status, text) = get(&http, &server.url("/readyz")).await;
        assert_eq!(status, 200, "{text}");
        if text.contains("directory: the directory cannot be written") != is_healthy {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    let metrics = http.get(server.url("/metrics")).bearer_auth("key-metrics");
    let metrics = metrics.send().await.unwrap().text().await.unwrap();
    let line = format!("afresh_healthy{{check=\"directory\"}} {}\n", u8::from(is_healthy));
    assert!(metrics.contains(&line), "{metrics}");
}

#[test]
fn paths_of_operations_are_those_of_a_program_where_a_request_names_a_sandbox() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let server = serve(with(sandboxes(dir.path(), &script))).await;
        let http = crate::common::client();
        for path in ["/healthz", "/readyz", "/metrics", "/status", "/status.json"] {
            let ask = async |header: &str, value: &str| {
                let request = http.get(server.url(path)).header(header, value);
                request.send().await.unwrap().status().as_u16()
            };
            assert_eq!(ask("x-other", "unknown").await, 200, "{path}");
            let pod = "10-42-0-7.default.pod.cluster.local:8080";
            assert_eq!(ask("host", pod).await, 200, "{path}");
            for (header, value) in [
                ("e2b-sandbox-id", "ff8bf581955372bd9011"),
                ("host", "8000-ff8bf581955372bd9011.example.com"),
            ] {
                assert_ne!(ask(header, value).await, 200, "{path} with {header}");
            }
        }
        server.end().await;
    });
}
