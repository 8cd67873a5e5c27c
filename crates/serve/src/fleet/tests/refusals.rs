//! Refusals by NATS that only an operator can remove.

use std::path::Path;

use async_nats::jetstream;
use bytes::Bytes;

use super::NatsServer;
use crate::error_response::ErrorResponse;
use crate::fleet::credentials::Role;
use crate::fleet::nats::{self, NatsConnection, NatsError};
use crate::fleet::{Fleet, FleetConfig, init};

/// The reason why no host with this configuration joins.
async fn refusal(config: &FleetConfig) -> String {
    match Fleet::join(config).await {
        Ok(_) => panic!("it has joined"),
        Err(error) => crate::failure::describe(&error),
    }
}

fn check(why: &str, parts: &[&str]) {
    for part in parts {
        assert!(why.contains(part), "{part}: {why}");
    }
    assert!(!why.contains("answer"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_refuses_a_client_is_not_reported_as_silent() {
    let text = "authorization: { user: host, password: secret }\n";
    let Some(server) = NatsServer::start_with(Some(text)) else { return };
    let mut config = server.config();
    check(&refusal(&config).await, &["refuses this client", "give `credentials`"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("credentials");
    std::fs::write(&file, "host wrong").unwrap();
    config.credentials = Some(file);
    check(&refusal(&config).await, &["refuses this client", "check the file `credentials`"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_authority_is_reported_as_such() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/tests/fleet/access");
    let file = |name: &str| dir.join(name).display().to_string();
    let (certificate, key) = (file("server.pem"), file("server-key.pem"));
    let text = format!("tls: {{ cert_file: {certificate:?}, key_file: {key:?} }}\n");
    let Some(server) = NatsServer::start_with(Some(&text)) else { return };
    let why = refusal(&server.config()).await;
    check(&why, &["no encrypted connection", "`ca`"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_of_another_configuration_is_refused_with_the_command_that_corrects_it() {
    let Some(server) = NatsServer::start() else { return };
    let config = server.config();
    let host = server.host().await;
    let context = jetstream::new(host.links.client.clone());
    let mut stream = context.get_stream("KV_afresh-default-kept").await.unwrap();
    let good = stream.info().await.unwrap().config.clone();
    let edited = jetstream::stream::Config { max_message_size: 100, ..good.clone() };
    context.update_stream(&edited).await.unwrap();
    let command = "nats stream edit KV_afresh-default-kept --max-msg-size";
    // A host that runs, one that joins, and a command.
    let refused = nats::put(&host.links.kept, "a.b", Bytes::from(vec![0; 1000])).await;
    let refused = refused.unwrap_err();
    assert!(matches!(refused, NatsError::Refused { .. }), "{refused}");
    check(&refused.to_string(), &[command]);
    check(&refusal(&config).await, &["takes entries of 100 bytes", command]);
    let why = init(&config).await.unwrap_err();
    check(&crate::failure::describe(&why), &[command]);
    context.update_stream(&good).await.unwrap();
    nats::put(&host.links.kept, "a.b", Bytes::from(vec![0; 1000])).await.unwrap();
    context.delete_stream("KV_afresh-default-kept").await.unwrap();
    let lost = nats::find(&host.links.kept, "a.b").await.err().unwrap();
    // A server that has just started answers the same.
    assert!(matches!(lost, NatsError::Missing { .. }), "{lost}");
    check(&lost.to_string(), &["afresh-default-kept", "just started", "afresh fleet restore"]);
    let answer = ErrorResponse::from(lost);
    assert!(answer.later && !answer.message.contains("refuse"), "{}", answer.message);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_without_the_permission_names_it() {
    let text = r#"authorization: { users: [
        { user: admin, password: a }
        { user: reader, password: r, permissions: { publish: { deny: ["$KV.afresh-default-kept.>"] } } }
    ] }"#;
    let Some(server) = NatsServer::start_with(Some(text)) else { return };
    let dir = tempfile::tempdir().unwrap();
    let config = |user: &str, password: &str| {
        let file = dir.path().join(user);
        std::fs::write(&file, format!("{user} {password}")).unwrap();
        FleetConfig { credentials: Some(file), ..server.config() }
    };
    init(&config("admin", "a")).await.unwrap();
    let links = NatsConnection::open(&config("reader", "r"), "test", Role::Reader).await.unwrap();
    let refused = nats::put(&links.kept, "a.b", Bytes::new()).await.unwrap_err();
    assert!(matches!(refused, NatsError::Refused { .. }), "{refused}");
    check(&refused.to_string(), &["Permissions Violation", "$KV.afresh-default-kept.a.b"]);
    // Where it has the permission, an answer comes.
    assert!(nats::find(&links.kept, "a.b").await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_without_an_answer_has_an_unknown_outcome() {
    let Some(mut server) = NatsServer::start() else { return };
    let host = server.host().await;
    let revision = nats::put(&host.links.kept, "a.b", Bytes::from("1")).await.unwrap();
    server.kill();
    let kept = &host.links.kept;
    let (found, made, changed, removed) = tokio::join!(
        nats::find(kept, "a.b"),
        nats::create(kept, "a.c", Bytes::from("2")),
        nats::update(kept, "a.b", Bytes::from("2"), revision),
        nats::remove(kept, "a.b", revision),
    );
    assert!(matches!(found.err(), Some(NatsError::Away(_))));
    for error in [made.map(drop), changed.map(drop), removed] {
        assert!(matches!(error, Err(NatsError::Unknown(_))), "{error:?}");
    }
}
