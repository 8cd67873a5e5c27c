//! Limits of the CPU time of code.

use std::time::Duration;

use crate::common::{built, run, scratch, serve};
use crate::sandbox::{Client, sandboxes, with};
use serde_json::Value;
#[cfg(linux_guests)]
use serde_json::json;

/// The error of code, as its name and its message.
fn error(lines: &[Value]) -> (&str, &str) {
    let error = lines.iter().find(|line| line["type"] == "error");
    let error = error.unwrap_or_else(|| panic!("{lines:?}"));
    (error["name"].as_str().unwrap(), error["value"].as_str().unwrap())
}

#[test]
fn busy_code_ends_at_the_cpu_time_limit_of_its_template() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.cpu_limit = Some(Duration::from_secs(3600));
        sandboxes.templates[0].cpu_limit = Some(Duration::from_millis(100));
        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        let sandbox = client.create().await;
        assert_eq!(client.value(&sandbox, "var n = 6; n").await, "6");
        let lines = client.execute(&sandbox, "n = 7; while (true);").await.unwrap();
        let (name, message) = error(&lines);
        assert_eq!(name, "TimeoutError");
        assert!(message.contains("CPU time limit of 100ms"), "{message}");
        // The code was undone, and the next has its own limit.
        assert_eq!(client.value(&sandbox, "n").await, "6");
        server.end().await;
    });
}

#[cfg(linux_guests)]
#[test]
fn the_cpu_time_limit_counts_no_waits_of_a_program() {
    let Some(guest) = crate::budgets::python() else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), guest);
        sandboxes.cpu_limit = Some(Duration::from_secs(1));
        let template = &mut sandboxes.templates[0];
        (template.language, template.linux) = ("python".to_owned(), true);
        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        let sandbox = client.create().await;
        assert_eq!(client.value(&sandbox, "import time\ntime.sleep(2)\n7").await, "7");
        let lines = client.execute(&sandbox, "while True: pass").await.unwrap();
        let (name, message) = error(&lines);
        assert_eq!(name, "TimeoutError");
        assert!(message.contains("CPU time limit of 1s"), "{message}");
        assert_eq!(client.value(&sandbox, "6 * 7").await, "42");
        server.end().await;
    });
}

/// Their CPU time is that of the whole sandbox, with its busy commands.
#[cfg(linux_guests)]
#[test]
fn commands_are_listed_and_ended_under_a_cpu_time_limit_that_ends_all_code() {
    let Some(guest) = crate::budgets::python() else { return };
    let dir = scratch();
    run(async {
        let mut sandboxes = sandboxes(dir.path(), guest);
        sandboxes.cpu_limit = Some(Duration::from_nanos(1));
        let template = &mut sandboxes.templates[0];
        (template.language, template.linux) = ("python".to_owned(), true);
        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        let sandbox = client.create().await;
        let lines = client.execute(&sandbox, "7").await.unwrap();
        assert_eq!(error(&lines).0, "TimeoutError");
        let agent = async |method: &str, body: Value| {
            let request = client
                .http
                .post(format!("{}/process.Process/{method}", client.base))
                .header("e2b-sandbox-id", sandbox["sandboxID"].as_str().unwrap())
                .header("x-access-token", sandbox["envdAccessToken"].as_str().unwrap())
                .body(body.to_string());
            let response = request.send().await.unwrap();
            (response.status().as_u16(), response.text().await.unwrap())
        };
        let (status, text) = agent("List", json!({})).await;
        assert_eq!((status, text.as_str()), (200, r#"{"processes":[]}"#));
        let kill = json!({"process": {"pid": 4242}, "signal": "SIGNAL_SIGKILL"});
        let (status, text) = agent("SendSignal", kill).await;
        assert!(status == 404 && text.contains("no such command"), "{status} {text}");
        server.end().await;
    });
}
