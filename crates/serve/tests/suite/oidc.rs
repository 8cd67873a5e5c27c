//! Bearer tokens of an issuer: a server with a discovery document and keys, which it changes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::common::{TEST_TIMEOUT, built, run, scratch, serve};
use crate::sandbox::{Client, KEY, sandboxes, with};
use afresh_serve::{AuditConfig, OidcConfig};

/// A key of the issuer.
struct Signer {
    id: &'static str,
    key: EncodingKey,
    jwk: Value,
}

impl Signer {
    fn new(id: &'static str) -> Self {
        let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let document = EcdsaKeyPair::generate_pkcs8(algorithm, &SystemRandom::new()).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref()).unwrap();
        let public = pair.public_key().as_ref();
        let part = |range: std::ops::Range<usize>| URL_SAFE_NO_PAD.encode(&public[range]);
        let jwk = json!({
            "kty": "EC", "crv": "P-256", "use": "sig", "alg": "ES256", "kid": id,
            "x": part(1..33), "y": part(33..65),
        });
        Self { id, key: EncodingKey::from_ec_der(document.as_ref()), jwk }
    }

    fn sign(&self, claims: &Value) -> String {
        let header = Header { kid: Some(self.id.to_owned()), ..Header::new(Algorithm::ES256) };
        encode(&header, claims, &self.key).unwrap()
    }
}

/// The documents of an issuer by their paths.
type Documents = Arc<Mutex<HashMap<String, Value>>>;

/// An issuer on this machine: its URL.
async fn issuer(documents: Documents) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = vec![0; 4096];
            let read = stream.read(&mut head).await.unwrap_or(0);
            let head = String::from_utf8_lossy(&head[..read]).into_owned();
            let path = head.split_whitespace().nth(1).unwrap_or_default();
            let found = documents.lock().unwrap().get(path).map(Value::to_string);
            let (status, body) = found.map_or((404, String::new()), |body| (200, body));
            let length = body.len();
            let answer = format!(
                "HTTP/1.1 {status} -\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            );
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    url
}

fn seconds(from_now: i64) -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    now as i64 + from_now
}

#[test]
fn tokens_of_an_issuer_count_for_their_tenant_as_long_as_they_are_valid() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let (first, second, foreign) = (Signer::new("1"), Signer::new("2"), Signer::new("1"));
        let documents = Documents::default();
        let url = issuer(documents.clone()).await;
        let keys = |signers: &[&Signer]| {
            let keys: Vec<&Value> = signers.iter().map(|signer| &signer.jwk).collect();
            json!({"keys": keys})
        };
        {
            let mut documents = documents.lock().unwrap();
            let described = json!({"issuer": url, "jwks_uri": format!("{url}/keys")});
            documents.insert("/.well-known/openid-configuration".to_owned(), described);
            // Others than signing keys are left out, and so are keys of unknown kinds.
            let mut all = keys(&[&first]);
            let others =
                [json!({"kty": "oct", "k": "c2VjcmV0", "kid": "1"}), json!({"kty": "new"})];
            all["keys"].as_array_mut().unwrap().extend(others);
            documents.insert("/keys".to_owned(), all);
        }
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.keys = sandboxes.keys.with_issuers([OidcConfig::new(&url, "afresh")]);
        let config = with(sandboxes);
        let server = serve(config.clone()).await;
        let http = reqwest::Client::new();
        let ask = |token: String| {
            let request = http.get(server.url("/v2/sandboxes")).bearer_auth(token);
            async {
                let response = request.send().await.unwrap();
                (response.status().as_u16(), response.text().await.unwrap())
            }
        };
        let claims = json!({
            "iss": url, "aud": ["other", "afresh"], "sub": "ci", "tenant": "acme", "exp": seconds(600),
        });
        let valid = first.sign(&claims);
        let until = |token: String| {
            let ask = &ask;
            async move {
                let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
                while ask(token.clone()).await.0 != 200 {
                    assert!(tokio::time::Instant::now() < deadline, "{:?}", ask(token).await);
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        };
        // The issuer's keys may not be fetched yet: then the status is 503.
        until(valid.clone()).await;
        // The same tenant as that of the key, which counts as before.
        Client::with_key(&server, KEY).create().await;
        let (_, listed) = ask(valid.clone()).await;
        assert_eq!(serde_json::from_str::<Vec<Value>>(&listed).unwrap().len(), 1, "{listed}");
        let changed = |key: &str, value: Value| {
            let mut claims = claims.clone();
            claims[key] = value;
            claims
        };
        let secret = EncodingKey::from_secret(b"secret");
        let header = Header { kid: Some("1".to_owned()), ..Header::new(Algorithm::HS256) };
        let symmetric = encode(&header, &claims, &secret).unwrap();
        let unsigned = {
            let parts: Vec<&str> = valid.split('.').collect();
            let none = URL_SAFE_NO_PAD.encode(r#"{"alg":"none","typ":"JWT"}"#);
            format!("{none}.{}.", parts[1])
        };
        for (token, status, reason) in [
            (first.sign(&changed("exp", json!(seconds(-60)))), 401, "expired"),
            (first.sign(&changed("exp", Value::Null)), 401, "does not count"),
            (first.sign(&changed("nbf", json!(seconds(600)))), 401, "not valid yet"),
            (first.sign(&changed("aud", json!("other"))), 401, "another audience"),
            (first.sign(&changed("iss", json!("http://other"))), 401, "issuer is not known"),
            (first.sign(&changed("tenant", json!(7))), 401, "no tenant"),
            (first.sign(&changed("tenant", json!("a b"))), 401, "no tenant"),
            (first.sign(&changed("scope", json!("openid afresh:metrics"))), 403, "scope `use`"),
            (first.sign(&changed("scope", json!("afresh:root"))), 401, "scope that is not known"),
            (foreign.sign(&claims), 401, "signature"),
            (symmetric, 401, "algorithm"),
            (unsigned, 401, "JWT"),
            (second.sign(&claims), 401, "its key"),
        ] {
            let (got, why) = ask(token).await;
            assert!(got == status && why.contains(reason), "{reason}: {got} {why}");
        }
        // The issuer rotates its keys; a token with the new one has them fetched again.
        documents.lock().unwrap().insert("/keys".to_owned(), keys(&[&second]));
        until(second.sign(&claims)).await;
        assert_eq!(ask(valid.clone()).await.0, 401);
        // A reload keeps the keys of issuers that stay.
        let mut renewed = config.clone();
        let other = renewed.sandboxes.as_mut().unwrap();
        other.keys = afresh_serve::Keys::new([("acme", "key-renewed")])
            .with_issuers([OidcConfig::new(&url, "afresh")]);
        server.handle.reload(&renewed).await.unwrap();
        assert_eq!(ask(second.sign(&claims)).await.0, 200);
        let admin = second.sign(&changed("scope", json!(["afresh:use", "afresh:admin"])));
        let usage = http.get(server.url("/usage")).header("x-api-key", admin);
        assert_eq!(usage.send().await.unwrap().status(), 200);
        let client = Client::with_key(&server, "key-renewed");
        assert_eq!(client.ask(Method::GET, "/v2/sandboxes", json!({})).await.0, 200);
        server.end().await;
    });
}

#[test]
fn a_token_beyond_the_limits_of_its_issuer_is_refused_and_recorded() {
    let Some(script) = built("quickjs.wasm") else { return };
    let dir = scratch();
    run(async {
        let signer = Signer::new("1");
        let documents = Documents::default();
        let url = issuer(documents.clone()).await;
        documents.lock().unwrap().insert("/keys".to_owned(), json!({"keys": [&signer.jwk]}));
        let mut limited = OidcConfig::new(&url, "afresh");
        limited.jwks = Some(format!("{url}/keys"));
        limited.tenants = Some(vec!["ci".to_owned(), "team-*".to_owned()]);
        let mut sandboxes = sandboxes(dir.path(), &script);
        sandboxes.keys = sandboxes.keys.with_issuers([limited.clone()]);
        let mut config = with(sandboxes);
        let log = dir.path().join("audit.log");
        config.audit = Some(AuditConfig::new(&log));
        let server = serve(config.clone()).await;
        let http = reqwest::Client::new();
        let ask = async |tenant: &str, scope: &str| {
            let token = signer.sign(&json!({
                "iss": url, "aud": "afresh", "sub": "job-7", "tenant": tenant, "scope": scope,
                "exp": seconds(600),
            }));
            let request = http.get(server.url("/v2/sandboxes")).bearer_auth(token);
            let response = request.send().await.unwrap();
            (response.status().as_u16(), response.text().await.unwrap())
        };
        let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
        while ask("ci", "").await.0 == 503 {
            assert!(tokio::time::Instant::now() < deadline, "the keys are not fetched");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        for tenant in ["ci", "team-", "team-red"] {
            assert_eq!(ask(tenant, "afresh:use").await.0, 200, "{tenant}");
        }
        for tenant in ["acme", "ci-2", "team", "Team-red"] {
            let (status, why) = ask(tenant, "").await;
            assert!(status == 403 && why.contains("may not name the tenant"), "{status} {why}");
        }
        // Without `scopes`, an issuer with limited tenants gives no scope that sees other tenants.
        let (status, why) = ask("ci", "afresh:use afresh:admin").await;
        assert!(status == 403 && why.contains("may not give the scope `admin`"), "{status} {why}");
        let denied: Vec<Value> = std::fs::read_to_string(&log)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .filter(|line: &Value| line["result"] == "denied")
            .collect();
        assert_eq!(denied.len(), 5, "{denied:?}");
        for line in &denied {
            assert_eq!((&line["key"], &line["tenant"]), (&json!("oidc:job-7"), &Value::Null));
            assert!(line["reason"].as_str().unwrap().contains("its issuer may not"), "{line}");
        }
        assert!(denied[0]["reason"].as_str().unwrap().contains("`acme`"), "{:?}", denied[0]);
        // A reload changes the limits.
        limited.scopes = Some(vec!["use".to_owned(), "admin".to_owned()]);
        let mut renewed = config;
        let keys = afresh_serve::Keys::new([("acme", KEY)]).with_issuers([limited]);
        renewed.sandboxes.as_mut().unwrap().keys = keys;
        server.handle.reload(&renewed).await.unwrap();
        let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
        while ask("ci", "afresh:use afresh:admin").await.0 != 200 {
            assert!(tokio::time::Instant::now() < deadline, "the keys are not fetched");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        server.end().await;
    });
}

#[test]
fn limits_of_an_issuer_that_mean_nothing_are_refused() {
    let check = |tenants: Option<&[&str]>, scopes: Option<&[&str]>| {
        let own = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect();
        let mut config = OidcConfig::new("https://issuer.example", "afresh");
        (config.tenants, config.scopes) = (tenants.map(own), scopes.map(own));
        config.check()
    };
    assert_eq!(check(Some(&["acme", "ci-*"]), Some(&["use", "metrics"])), Ok(()));
    for tenants in [&[] as &[&str], &[""], &["*"], &["a*b"], &["a b"]] {
        assert!(check(Some(tenants), None).unwrap_err().contains("`tenants`"), "{tenants:?}");
    }
    for scopes in [&[] as &[&str], &["root"]] {
        let why = check(None, Some(scopes)).unwrap_err();
        assert!(why.contains("`use`, `admin` and `metrics` exist"), "{why}");
    }
}

#[test]
fn issuers_are_reached_over_https_or_on_this_machine() {
    for (issuer, fault) in [
        ("https://issuer.example", None),
        ("http://localhost:8080/realm", None),
        ("http://issuer.example", Some("https://")),
        ("issuer", Some("no URL")),
    ] {
        let checked = OidcConfig::new(issuer, "afresh").check();
        assert_eq!(checked.is_err(), fault.is_some(), "{issuer}");
        assert!(fault.is_none_or(|fault| checked.unwrap_err().contains(fault)));
    }
    assert!(OidcConfig::new("https://issuer.example", "").check().is_err());
}
