//! HTTPS: the same answers after a handshake, none without one, and clear errors about invalid
//! files.
//!
//! The certificates and keys in this folder are for 127.0.0.1, and for nothing else.

use std::path::PathBuf;
use std::time::Duration;

use crate::common::{TEST_TIMEOUT, config, keeper, post, raw, run, scratch, serve};
use afresh_serve::{Config, Server, TlsConfig};

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/suite/tls").join(name)
}

fn with_tls(mut config: Config) -> Config {
    config.tls = Some(TlsConfig { certificate: file("certificate.pem"), key: file("key.pem") });
    config
}

#[test]
fn only_clients_that_complete_a_handshake_are_answered() {
    let dir = scratch();
    run(async {
        let mut config = with_tls(config([keeper(dir.path())]));
        config.head_timeout = Duration::from_secs(10);
        let server = serve(config).await;
        let pem = std::fs::read(file("certificate.pem")).unwrap();
        let known = reqwest::Certificate::from_pem(&pem).unwrap();
        let builder = || reqwest::Client::builder().no_proxy().timeout(TEST_TIMEOUT);
        let client = builder().tls_certs_only([known]).build().unwrap();
        let url = format!("https://{}/", server.addr);
        for _ in 0..3 {
            assert_eq!(post(&client, &url, "x").await, (200, "warm".to_owned()));
        }
        // A client that does not know the certificate turns away, and plain HTTP gets no answer.
        let stranger = builder().tls_certs_only([]).build().unwrap();
        assert!(stranger.get(&url).send().await.is_err());
        let answer = raw(server.addr, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
        assert!(!answer.starts_with("HTTP/"), "{answer}");
        // A silent one is dropped after a time, and does not delay others.
        let silent = tokio::net::TcpStream::connect(server.addr).await.unwrap();
        assert_eq!(post(&client, &url, "y").await, (200, "warm".to_owned()));
        let mut byte = [0; 1];
        let closed = async {
            loop {
                silent.readable().await.unwrap();
                match silent.try_read(&mut byte) {
                    Ok(1..) => {}
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    Ok(0) | Err(_) => break,
                }
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, closed).await.expect("it is given up");
        server.end().await;
    });
}

#[test]
fn a_reload_renews_the_certificate() {
    let dir = scratch();
    run(async {
        let place = |name: &str| dir.path().join(name);
        let put = |certificate: &str, key: &str| {
            std::fs::copy(file(certificate), place("certificate.pem")).unwrap();
            std::fs::copy(file(key), place("key.pem")).unwrap();
        };
        put("certificate.pem", "key.pem");
        let mut config = config([keeper(dir.path())]);
        config.tls =
            Some(TlsConfig { certificate: place("certificate.pem"), key: place("key.pem") });
        let server = serve(config.clone()).await;
        let url = format!("https://{}/", server.addr);
        let reached = async |certificate: &str| {
            let known = reqwest::Certificate::from_pem(&std::fs::read(file(certificate)).unwrap());
            let client = reqwest::Client::builder().no_proxy().timeout(TEST_TIMEOUT);
            let client = client.tls_certs_only([known.unwrap()]).build().unwrap();
            client.get(&url).send().await.is_ok()
        };
        assert!(reached("certificate.pem").await && !reached("renewed.pem").await);
        // A pair that does not belong together leaves the one there is.
        put("renewed.pem", "key.pem");
        server.handle.reload(&config).await.unwrap_err();
        assert!(reached("certificate.pem").await);
        put("renewed.pem", "renewed-key.pem");
        server.handle.reload(&config).await.unwrap();
        assert!(!reached("certificate.pem").await && reached("renewed.pem").await);
        server.end().await;
    });
}

#[test]
fn files_that_will_not_do_are_named() {
    let dir = scratch();
    run(async {
        let empty = dir.path().join("empty.pem");
        std::fs::write(&empty, "").unwrap();
        for (certificate, key, named) in [
            (dir.path().join("missing.pem"), file("key.pem"), "missing.pem"),
            (empty.clone(), file("key.pem"), "empty.pem"),
            (file("certificate.pem"), empty.clone(), "empty.pem"),
            (file("certificate.pem"), file("certificate.pem"), "certificate.pem"),
        ] {
            let mut config = config([keeper(dir.path())]);
            config.tls = Some(TlsConfig { certificate, key });
            let error = Server::bind(config).await.expect_err("it will not do").to_string();
            assert!(error.contains(named), "{error}");
        }
    });
}
