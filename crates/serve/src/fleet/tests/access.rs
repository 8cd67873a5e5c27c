//! Roles of clients under `deploy/nats/fleet.conf`, with the certificates of the tests of the
//! command.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::NatsServer;
use crate::fleet::credentials::Role;
use crate::fleet::nats::NatsConnection;
use crate::fleet::{FleetConfig, init, nodes};

/// Far longer than a refusal takes on a busy machine.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(60);

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/tests/fleet/access").join(name)
}

fn config(server: &NatsServer, dir: &Path, user: &str) -> FleetConfig {
    let mut config = server.config();
    config.credentials = Some(match user {
        "host" => file("host.seed"),
        user => {
            let credentials = dir.join(user);
            let password = user.to_uppercase();
            std::fs::write(&credentials, format!("{user} {password}-password\n")).unwrap();
            credentials
        }
    });
    config.ca = Some(file("ca.pem"));
    config.certificate = Some(file("client.pem"));
    config.certificate_key = Some(file("client-key.pem"));
    config
}

/// The last refusal of the server that has this subject.
async fn refusal_of(links: &NatsConnection, subject: &str) -> String {
    let until = Instant::now() + REFUSAL_TIMEOUT;
    loop {
        if let Some(refusal) = links.refusals.find(|refusal| refusal.contains(subject)) {
            return refusal;
        }
        assert!(Instant::now() < until, "the server does not refuse {subject}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The refusal of a subscription, or `None` if the server accepted it.
async fn refusal(config: &FleetConfig, role: Role, subject: &str) -> Option<String> {
    let links = NatsConnection::open(config, "test", role).await.unwrap();
    let _answers = links.client.subscribe(subject.to_owned()).await.unwrap();
    // The server answers in the order of requests, so that a refusal of the first subject is here
    // when that of the second one is.
    let _refused = links.client.subscribe("afresh-test.refused").await.unwrap();
    links.client.flush().await.unwrap();
    refusal_of(&links, "afresh-test.refused").await;
    links.refusals.find(|refusal| refusal.contains(subject))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_receives_its_own_answers_only() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/nats/fleet.conf");
    let text = std::fs::read_to_string(path).unwrap();
    // The arguments of the server name its store.
    let lines = text.lines().filter(|line| !line.starts_with("jetstream"));
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    let text = text.replace("/etc/nats/", &format!("{}/", file("").display()));
    let text = text.replace("_PASSWORD", "-password");
    let Some(server) = NatsServer::start_with(Some(&text)) else { return };
    let dir = tempfile::tempdir().unwrap();
    init(&config(&server, dir.path(), "admin")).await.unwrap();
    let roles = [
        ("host", Role::Host),
        ("operator", Role::Operator),
        ("reader", Role::Reader),
        ("admin", Role::Admin),
    ];
    // A host drains no other, whatever its command asks for.
    let host = config(&server, dir.path(), "host");
    let links = NatsConnection::open(&host, "test", Role::Host).await.unwrap();
    links.client.publish("afresh.default.host.other.drain", Bytes::new()).await.unwrap();
    refusal_of(&links, "afresh.default.host.other.drain").await;
    // A command with the credentials of another role names the cause.
    let why = nodes(&host).await.err().unwrap();
    assert!(crate::failure::describe(&why).contains("_INBOX.afresh-default.operator"), "{why}");
    for (user, role) in roles {
        let config = config(&server, dir.path(), user);
        for (_, other) in roles {
            let subject = format!("{}.>", other.inbox("default"));
            let refusal = refusal(&config, role, &subject).await;
            assert_eq!(refusal.is_none(), role == other, "{user} {other:?}: {refusal:?}");
        }
        for subject in ["_INBOX.>", "_INBOX.afresh-default.>", ">"] {
            let refusal = refusal(&config, role, subject).await;
            assert!(refusal.is_some(), "{user} reads {subject}");
        }
    }
}
