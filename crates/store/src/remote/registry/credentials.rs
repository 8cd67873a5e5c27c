//! Credentials for a registry.
//!
//! Looked for in this order: options of the address, the environment, the files and credential
//! helpers of the Docker configuration. They are looked for only once a registry asks, and sent
//! only to it and to the token server that it names.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::remote::RemoteError;

/// Longest configuration and longest answer of a helper.
const LIMIT: u64 = 1 << 20;

/// The proof of identity.
#[derive(Clone)]
pub(super) enum Credentials {
    Anonymous,
    Password {
        user: String,
        password: String,
    },
    /// To be exchanged for an access token.
    Identity(String),
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Config {
    auths: HashMap<String, Entry>,
    cred_helpers: HashMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperAnswer {
    username: String,
    secret: String,
}

/// Finds the credentials for `registry`. Blocks; a helper gets at most `limit`.
pub(super) fn find(registry: &str, limit: Duration) -> Result<Credentials, RemoteError> {
    let var = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let wrong = |why: String| RemoteError::Credentials { registry: registry.to_owned(), why };
    if let Some(found) = from_environment(registry, &var).map_err(wrong)? {
        return Ok(found);
    }
    let folder = var("DOCKER_CONFIG")
        .map(PathBuf::from)
        .or_else(|| var("HOME").map(|home| PathBuf::from(home).join(".docker")));
    let Some(path) = folder.map(|folder| folder.join("config.json")) else {
        return Ok(Credentials::Anonymous);
    };
    let mut text = Vec::new();
    match File::open(&path).and_then(|file| file.take(LIMIT).read_to_end(&mut text)) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Credentials::Anonymous);
        }
        Err(error) => return Err(wrong(format!("{}: {error}", path.display()))),
    }
    // Errors quote nothing of it: the file holds secrets.
    let config: Config = serde_json::from_slice(&text)
        .map_err(|e| wrong(format!("{} does not parse at line {}", path.display(), e.line())))?;
    from_config(&config, registry, limit).map_err(wrong)
}

/// The credentials in the environment for `registry`: they name their registry, so that no other
/// registry, such as one in an address from elsewhere, receives them.
fn from_environment(
    registry: &str,
    var: &dyn Fn(&str) -> Option<String>,
) -> Result<Option<Credentials>, String> {
    let (Some(user), Some(password)) =
        (var("AFRESH_REGISTRY_USER"), var("AFRESH_REGISTRY_PASSWORD"))
    else {
        return Ok(None);
    };
    match var("AFRESH_REGISTRY") {
        Some(own) if own == registry => Ok(Some(Credentials::Password { user, password })),
        Some(_) => Ok(None),
        None => Err(format!(
            "AFRESH_REGISTRY_USER does not say which registry it is for: set AFRESH_REGISTRY={registry} \
             if it is this one"
        )),
    }
}

fn from_config(config: &Config, registry: &str, limit: Duration) -> Result<Credentials, String> {
    let keys: Vec<String> = match registry {
        "docker.io" => vec!["https://index.docker.io/v1/".to_owned(), "docker.io".to_owned()],
        _ => ["", "https://", "http://"]
            .iter()
            .flat_map(|scheme| ["", "/", "/v1/", "/v2/"].map(|end| (scheme, end)))
            .map(|(scheme, end)| format!("{scheme}{registry}{end}"))
            .collect(),
    };
    let helper = keys.iter().find_map(|key| config.cred_helpers.get(key));
    if let Some(helper) = helper.or(config.creds_store.as_ref()) {
        let found = ask(helper, &keys[0], limit)?;
        if let Some(found) = found {
            return Ok(found);
        }
    }
    let Some(entry) = keys.iter().find_map(|key| config.auths.get(key)) else {
        return Ok(Credentials::Anonymous);
    };
    if !entry.identitytoken.is_empty() {
        return Ok(Credentials::Identity(entry.identitytoken.clone()));
    }
    let (mut user, mut password) = (entry.username.clone(), entry.password.clone());
    if !entry.auth.is_empty() {
        let bytes = STANDARD.decode(entry.auth.trim_end_matches('\0')).unwrap_or_default();
        let text = String::from_utf8(bytes).unwrap_or_default();
        let (first, second) = text
            .split_once(':')
            .ok_or("`auth` in Docker's configuration is not the base64 of user:password")?;
        (user, password) = (first.to_owned(), second.to_owned());
    }
    Ok(if user.is_empty() {
        Credentials::Anonymous
    } else {
        Credentials::Password { user, password }
    })
}

/// Asks `docker-credential-NAME`; `None` when it has none.
fn ask(helper: &str, key: &str, limit: Duration) -> Result<Option<Credentials>, String> {
    if !helper.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c)) {
        return Err(
            "the name of the credential helper in the Docker configuration is invalid".to_owned()
        );
    }
    let program = format!("docker-credential-{helper}");
    let failed = |e: std::io::Error| format!("`{program} get`: {e}");
    let mut child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        // The answer shows a helper that does not read.
        let _ = stdin.write_all(key.as_bytes());
    }
    let deadline = Instant::now() + limit;
    let status = loop {
        match child.try_wait().map_err(failed)? {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                // It may have ended just now, which is as good.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("`{program} get` did not answer within {limit:?}"));
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    if !status.success() {
        return Ok(None);
    }
    let mut text = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(LIMIT).read_to_end(&mut text).map_err(failed)?;
    }
    let found: HelperAnswer = serde_json::from_slice(&text)
        .map_err(|_| format!("`{program} get` answered something that is not JSON"))?;
    Ok(Some(if found.username == "<token>" {
        Credentials::Identity(found.secret)
    } else {
        Credentials::Password { user: found.username, password: found.secret }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_secret(config: &str, registry: &str) -> String {
        let config: Config = serde_json::from_str(config).unwrap();
        match from_config(&config, registry, Duration::from_secs(5)) {
            Ok(Credentials::Anonymous) => "nobody".to_owned(),
            Ok(Credentials::Password { user, password }) => format!("{user}/{password}"),
            Ok(Credentials::Identity(token)) => format!("token {token}"),
            Err(error) => error,
        }
    }

    #[test]
    fn dockers_configuration_is_understood() {
        let auth = STANDARD.encode("me:pass:word");
        let config = format!(
            r#"{{"auths": {{"host:5000": {{"auth": "{auth}"}},
                "https://index.docker.io/v1/": {{"username": "u", "password": "p"}},
                "https://other/v2/": {{"identitytoken": "t"}}, "bad": {{"auth": "%"}}}},
                "unknown": 1}}"#
        );
        assert_eq!(find_secret(&config, "host:5000"), "me/pass:word");
        assert_eq!(find_secret(&config, "docker.io"), "u/p");
        assert_eq!(find_secret(&config, "other"), "token t");
        assert_eq!(find_secret(&config, "host"), "nobody");
        assert!(find_secret(&config, "bad").contains("base64"));
    }

    #[test]
    fn the_environment_is_for_the_registry_that_it_names() {
        let found = |registry: &str, own: Option<&str>, user: Option<&str>| {
            let var = |name: &str| match name {
                "AFRESH_REGISTRY" => own.map(str::to_owned),
                "AFRESH_REGISTRY_USER" => user.map(str::to_owned),
                _ => Some("secret".to_owned()),
            };
            from_environment(registry, &var).map(|found| found.is_some())
        };
        assert_eq!(found("host:5000", Some("host:5000"), Some("me")), Ok(true));
        assert_eq!(found("evil.example", Some("host:5000"), Some("me")), Ok(false));
        assert_eq!(found("host", Some("host:5000"), Some("me")), Ok(false));
        assert_eq!(found("host", None, None), Ok(false));
        assert!(found("host", None, Some("me")).unwrap_err().contains("AFRESH_REGISTRY=host"));
    }

    #[test]
    fn a_missing_or_odd_helper_is_named() {
        let config = r#"{"credHelpers": {"a": "no-such-helper-here", "b": "../evil"}}"#;
        assert!(find_secret(config, "a").contains("docker-credential-no-such-helper-here"));
        assert!(find_secret(config, "b").contains("name"));
        assert_eq!(find_secret(config, "c"), "nobody");
    }
}
