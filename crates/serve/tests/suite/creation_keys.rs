//! Requests for a sandbox with a key (`Idempotency-Key`): however often they are sent, they make
//! one.

use crate::common::{Running, built, run, scratch, serve};
use crate::sandbox::{Client, KEY, path, sandboxes, with};
use reqwest::Method;
use serde_json::{Value, json};

/// Asks for a sandbox with a key: the status, whether an earlier request has made the sandbox, and
/// the answer.
async fn create(server: &Running, client: &Client, key: &str, body: &Value) -> (u16, bool, Value) {
    let request = client.http.post(server.url("/sandboxes"));
    let request = request.header("x-api-key", client.key).header("idempotency-key", key);
    let response = request.body(body.to_string()).send().await.unwrap();
    let is_replay = response.headers().get("idempotency-replayed").is_some();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, is_replay, serde_json::from_str(&text).unwrap())
}

#[test]
fn a_repeated_request_with_a_key_gets_the_same_sandbox() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let sandboxes = sandboxes(dir.path(), &script);
        let server = serve(with(sandboxes.clone())).await;
        let mut client = Client::of(&server);
        let body = json!({"templateID": "script", "timeout": 600});
        // All at once: the answers of most of them could have been lost.
        let asking = (0..8).map(|_| create(&server, &client, "one", &body));
        let answers = futures_util::future::join_all(asking).await;
        let (_, _, first) = &answers[0];
        let replays = answers.iter().filter(|(_, is_replay, _)| *is_replay).count();
        assert_eq!(replays, 7, "{answers:?}");
        assert!(answers.iter().all(|(status, _, made)| *status == 201 && made == first));
        assert_eq!(client.value(first, "var n = 1; n").await, "1");
        // The time is no part of the request; the rest is.
        let later = json!({"templateID": "script", "timeout": 700});
        assert_eq!(&create(&server, &client, "one", &later).await.2, first);
        let other = json!({"templateID": "script", "metadata": {"a": "b"}});
        let (status, _, why) = create(&server, &client, "one", &other).await;
        assert_eq!(status, 422, "{why}");
        assert!(why["message"].as_str().unwrap().contains("use another key"), "{why}");
        assert_eq!(create(&server, &client, "a b", &body).await.0, 400);
        // Keys of other tenants are others.
        client.key = "key-of-other";
        let (status, is_replay, foreign) = create(&server, &client, "one", &body).await;
        assert!(status == 201 && !is_replay && foreign["sandboxID"] != first["sandboxID"]);
        client.key = KEY;
        // Forks have none.
        let forks = client.post(&path(first, "/fork"), json!({"count": 1})).await;
        assert_eq!(client.ask(Method::POST, &path(first, "/pause"), json!({})).await.0, 204);
        server.end().await;

        let server = serve(with(sandboxes)).await;
        let client = Client::of(&server);
        let (status, is_replay, again) = create(&server, &client, "one", &body).await;
        assert_eq!((status, is_replay, &again), (201, true, first));
        // Once it has ended, the key makes another one.
        assert_eq!(client.ask(Method::DELETE, &path(first, ""), json!({})).await.0, 204);
        let (status, is_replay, next) = create(&server, &client, "one", &body).await;
        assert!(status == 201 && !is_replay && next["sandboxID"] != first["sandboxID"]);
        assert_ne!(next["sandboxID"], forks[0]["sandbox"]["sandboxID"]);
        server.end().await;
    });
}
