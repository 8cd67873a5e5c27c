//! Proving to a registry that we may read or write: the `WWW-Authenticate` challenge, and tokens.

use std::sync::{Mutex, PoisonError};

use reqwest::header::{HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use reqwest::redirect::Policy;
use serde::Deserialize;
use url::Url;

use super::credentials::{self, Credentials};
use super::{Registry, http_client};
use crate::remote::RemoteError;

/// The purpose of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Pull,
    Push,
}

/// Longest answer of a token server.
const MAX_TOKEN: u64 = 1 << 20;

/// Results so far: credentials, and a header for each kind of access.
#[derive(Default)]
pub(super) struct Session {
    credentials: Mutex<Option<Credentials>>,
    headers: Mutex<[Option<HeaderValue>; 2]>,
}

impl Session {
    pub(super) fn with(credentials: Option<Credentials>) -> Self {
        Self { credentials: Mutex::new(credentials), headers: Mutex::default() }
    }

    pub(super) fn header(&self, access: Access) -> Option<HeaderValue> {
        self.headers.lock().unwrap_or_else(PoisonError::into_inner)[access as usize].clone()
    }

    fn set_header(&self, access: Access, header: HeaderValue) {
        self.headers.lock().unwrap_or_else(PoisonError::into_inner)[access as usize] = Some(header);
    }
}

/// How a registry wants to be convinced.
#[derive(Debug, PartialEq, Eq)]
enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String>, scope: Option<String> },
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl Registry {
    /// Answers a challenge: the header to send from now on, or `None` when there is nothing to
    /// answer with, so that the refusal stands.
    pub(super) async fn authorize(
        &self,
        headers: &HeaderMap,
        access: Access,
    ) -> Result<Option<HeaderValue>, RemoteError> {
        let texts = headers.get_all(WWW_AUTHENTICATE).iter().filter_map(|v| v.to_str().ok());
        let mut challenges: Vec<_> = texts.filter_map(parse).collect();
        challenges.sort_by_key(|challenge| *challenge == Challenge::Basic);
        let credentials = self.credentials().await?;
        let text = match (challenges.into_iter().next(), credentials) {
            (Some(Challenge::Basic), Credentials::Password { user, password }) => {
                use base64::Engine;
                let pair = format!("{user}:{password}");
                format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(pair))
            }
            (Some(Challenge::Bearer { realm, service, scope }), credentials) => {
                let mut wanted = format!("repository:{}:pull", self.address.repository);
                if access == Access::Push {
                    wanted.push_str(",push");
                }
                // Its own word for the scope, unless that is for less than we need.
                let scope = scope
                    .filter(|scope| access == Access::Pull || scope.contains("push"))
                    .unwrap_or(wanted);
                let token = self.token(&realm, service.as_deref(), &scope, &credentials).await?;
                format!("Bearer {token}")
            }
            _ => return Ok(None),
        };
        let mut header = HeaderValue::from_str(&text)
            .map_err(|_| self.protocol("authentication", "the token holds control characters"))?;
        header.set_sensitive(true);
        self.session.set_header(access, header.clone());
        Ok(Some(header))
    }

    /// The credentials, looked for once.
    async fn credentials(&self) -> Result<Credentials, RemoteError> {
        let known = || self.session.credentials.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(credentials) = known().clone() {
            return Ok(credentials);
        }
        let (registry, limit) = (self.address.registry.clone(), self.retry.policy.timeout / 2);
        let found = tokio::task::spawn_blocking(move || credentials::find(&registry, limit))
            .await
            .map_err(|e| RemoteError::Runtime(e.into()))??;
        *known() = Some(found.clone());
        Ok(found)
    }

    async fn token(
        &self,
        realm: &str,
        service: Option<&str>,
        scope: &str,
        credentials: &Credentials,
    ) -> Result<String, RemoteError> {
        let what = "the registry's token server";
        let mut url = Url::parse(realm)
            .ok()
            .filter(|url| self.address.allows(url))
            .ok_or_else(|| self.protocol(what, "its address is not https"))?;
        let mut query = vec![("scope", scope)];
        query.extend(service.map(|service| ("service", service)));
        let request = if let Credentials::Identity(token) = credentials {
            query.extend([
                ("grant_type", "refresh_token"),
                ("client_id", "afresh"),
                ("refresh_token", token),
            ]);
            let body =
                url::form_urlencoded::Serializer::new(String::new()).extend_pairs(query).finish();
            // A redirection would repeat the body, with the refresh token, at another server.
            http_client(&self.address, &self.retry, Policy::none())?
                .post(url)
                .header(reqwest::header::CONTENT_TYPE, "application/x-www-form-urlencoded")
                .body(body)
        } else {
            url.query_pairs_mut().extend_pairs(query);
            let request = self.client.get(url);
            match credentials {
                Credentials::Password { user, password } => {
                    request.basic_auth(user, Some(password))
                }
                _ => request,
            }
        };
        let response = request.send().await.map_err(|e| self.broken(what, e))?;
        let response = self.accepted(what, response).await?;
        let bytes = self.body(what, response, MAX_TOKEN).await?;
        serde_json::from_slice::<Token>(&bytes)
            .ok()
            .and_then(|token| token.token.or(token.access_token))
            .filter(|token| !token.is_empty())
            .ok_or_else(|| self.protocol(what, "it answered without a token"))
    }
}

/// Reads one challenge: a scheme, and parameters with or without quotes.
fn parse(text: &str) -> Option<Challenge> {
    let (scheme, mut rest) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
    if scheme.eq_ignore_ascii_case("basic") {
        return Some(Challenge::Basic);
    }
    if !scheme.eq_ignore_ascii_case("bearer") {
        return None;
    }
    let (mut realm, mut service, mut scope) = (None, None, None);
    loop {
        rest = rest.trim_start_matches([' ', ',']);
        let Some((key, after)) = rest.split_once('=') else { break };
        let (value, after) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"')?,
            None => after.split_once(',').unwrap_or((after, "")),
        };
        let value = Some(value.to_owned());
        match key.trim().to_ascii_lowercase().as_str() {
            "realm" => realm = value,
            "service" => service = value,
            "scope" => scope = value,
            _ => {}
        }
        rest = after;
    }
    Some(Challenge::Bearer { realm: realm?, service, scope })
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{SocketAddr, TcpListener};

    use super::*;
    use crate::remote::RetryPolicy;
    use crate::remote::registry::address::Address;

    #[test]
    fn challenges_are_read_with_and_without_quotes() {
        let scope = Some("repository:a/b:pull,push".to_owned());
        assert_eq!(
            parse(r#"Bearer realm="https://x/t",service="s",scope="repository:a/b:pull,push""#),
            Some(Challenge::Bearer {
                realm: "https://x/t".into(),
                service: Some("s".into()),
                scope
            })
        );
        assert_eq!(
            parse("bearer realm=https://x/t, error=\"invalid\""),
            Some(Challenge::Bearer { realm: "https://x/t".into(), service: None, scope: None })
        );
        assert_eq!(parse("Basic realm=\"x\""), Some(Challenge::Basic));
        assert_eq!(parse("basic"), Some(Challenge::Basic));
        for odd in ["Bearer", "Bearer realm=\"x", "Negotiate abc", "", "Bearer service=s"] {
            assert_eq!(parse(odd), None, "{odd}");
        }
    }

    /// Answers one request with a redirection to `to`.
    fn redirect_once(server: &TcpListener, to: SocketAddr) {
        let (mut stream, _) = server.accept().unwrap();
        let mut head = [0; 4096];
        let len = stream.read(&mut head).unwrap();
        assert!(head[..len].starts_with(b"POST /token"));
        let location = format!("Location: http://{to}/token");
        let answer =
            format!("HTTP/1.1 307 Temporary Redirect\r\n{location}\r\nContent-Length: 0\r\n\r\n");
        stream.write_all(answer.as_bytes()).unwrap();
    }

    #[test]
    fn a_refresh_token_does_not_follow_a_redirection() {
        let bind = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (token_server, other) = (bind(), bind());
        let [own, to] = [&token_server, &other].map(|server| server.local_addr().unwrap());
        let address = Address::parse(&format!("oci+http://{own}/a:latest")).unwrap().unwrap();
        let registry = Registry::new(address, RetryPolicy::default().into(), &[]).unwrap();
        let credentials = Credentials::Identity("secret".to_owned());
        let realm = format!("http://{own}/token");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let result = std::thread::scope(|scope| {
            scope.spawn(|| redirect_once(&token_server, to));
            runtime.block_on(registry.token(&realm, None, "repository:a:pull", &credentials))
        });
        assert!(result.unwrap_err().to_string().contains("307"));
        other.set_nonblocking(true).unwrap();
        assert_eq!(other.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}
