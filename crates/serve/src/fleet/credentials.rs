//! Identity of a client of NATS: a token, a user and a password, an nkey, a file of credentials, or
//! a certificate.
//!
//! Promises: the file is read again for each connection, so a renewed token or JWT needs no
//! restart. An unusable file is an error before the first connection. Secrets appear in no error
//! and no log.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Auth, AuthError, ConnectOptions};
use nkeys::KeyPair;

use super::config::FleetConfig;

/// Maximum bytes of a file with credentials.
const MAX_FILE: u64 = 64 << 10;
/// Characters of the seed of an nkey.
const SEED_LENGTH: usize = 58;

/// The role of a client of NATS in the fleet. NATS can permit each role to receive its own answers
/// alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// `afresh serve`.
    Host,
    /// `afresh nodes` and `afresh drain`.
    Operator,
    /// `afresh gc`, `afresh fleet backup` and `afresh fleet seal --check`.
    Reader,
    /// `afresh fleet init`, `afresh fleet restore` and `afresh fleet seal`.
    Admin,
}

impl Role {
    /// The beginning of the subjects of answers to this role.
    pub(super) fn inbox(self, fleet: &str) -> String {
        let role = match self {
            Self::Host => "host",
            Self::Operator => "operator",
            Self::Reader => "reader",
            Self::Admin => "admin",
        };
        format!("_INBOX.afresh-{fleet}.{role}")
    }

    /// Whether it makes missing buckets.
    pub(super) fn makes_buckets(self) -> bool {
        matches!(self, Self::Host | Self::Admin)
    }
}

/// The content of a file with credentials.
enum Credentials {
    Token(String),
    Password {
        user: String,
        password: String,
    },
    Nkey(KeyPair),
    /// A JWT, and the key that it names.
    Signed {
        jwt: String,
        key: KeyPair,
    },
}

/// The text between the dashed lines around `what`.
fn block(text: &str, what: &str) -> Option<String> {
    let (_, rest) = text.split_once(&format!("-----BEGIN {what}-----"))?;
    let (inner, _) = rest.split_once("-----")?;
    Some(inner.trim().to_owned()).filter(|inner| !inner.is_empty())
}

fn parse(text: &str) -> Result<Credentials, String> {
    if text.contains("-----BEGIN") {
        let jwt = block(text, "NATS USER JWT").ok_or("there is no `NATS USER JWT`")?;
        let seed = block(text, "USER NKEY SEED").ok_or("there is no `USER NKEY SEED`")?;
        let key = KeyPair::from_seed(&seed).map_err(|error| error.to_string())?;
        return Ok(Credentials::Signed { jwt, key });
    }
    let mut words = text.split_whitespace();
    match (words.next(), words.next(), words.next()) {
        (Some(seed), None, None) if seed.starts_with("SU") && seed.len() == SEED_LENGTH => {
            Ok(Credentials::Nkey(KeyPair::from_seed(seed).map_err(|error| error.to_string())?))
        }
        (Some(token), None, None) => Ok(Credentials::Token(token.to_owned())),
        (Some(user), Some(password), None) => {
            Ok(Credentials::Password { user: user.to_owned(), password: password.to_owned() })
        }
        _ => Err("one word is a token or the seed of an nkey, two are a user and a password, and a `.creds` file has \
                  a JWT and a seed"
            .to_owned()),
    }
}

fn read(file: &Path) -> Result<Credentials, String> {
    use std::io::Read;
    let read = || {
        let mut text = String::new();
        std::fs::File::open(file)?.take(MAX_FILE).read_to_string(&mut text)?;
        Ok::<_, std::io::Error>(text)
    };
    let text = read().map_err(|error| format!("the credentials {}: {error}", file.display()))?;
    parse(&text).map_err(|fault| format!("{} is no credentials: {fault}", file.display()))
}

impl Credentials {
    /// The answer to a server that connects with this nonce.
    fn answer(self, nonce: &[u8]) -> Result<Auth, AuthError> {
        let mut auth = Auth::new();
        match self {
            Self::Token(token) => auth.token = Some(token),
            Self::Password { user, password } => {
                (auth.username, auth.password) = (Some(user), Some(password));
            }
            Self::Nkey(key) => {
                auth.nkey = Some(key.public_key());
                auth.signature = Some(key.sign(nonce).map_err(AuthError::new)?);
            }
            Self::Signed { jwt, key } => {
                auth.signature = Some(key.sign(nonce).map_err(AuthError::new)?);
                auth.jwt = Some(jwt);
            }
        }
        Ok(auth)
    }
}

/// The options of a connection, up to its time limits.
pub(super) fn options(
    config: &FleetConfig,
    role: Role,
    answer: Duration,
) -> Result<ConnectOptions, String> {
    let mut options = match &config.credentials {
        None => ConnectOptions::new(),
        Some(file) => {
            read(file)?;
            let file: Arc<Path> = file.as_path().into();
            ConnectOptions::with_auth_callback(move |nonce| {
                let file = file.clone();
                async move { read(&file).map_err(AuthError::new)?.answer(&nonce) }
            })
        }
    };
    if let Some(authority) = &config.ca {
        options = options.add_root_certificates(readable(authority)?);
    }
    match (&config.certificate, &config.certificate_key) {
        (Some(certificate), Some(key)) => {
            options = options.add_client_certificate(readable(certificate)?, readable(key)?);
        }
        (None, None) => {}
        _ => {
            return Err(
                "a client certificate for NATS needs both a certificate and a key".to_owned()
            );
        }
    }
    // A password must not be sent in clear because a server does not offer TLS.
    let encrypted = config.ca.is_some() || config.certificate.is_some();
    Ok(options
        .require_tls(encrypted || config.nats.contains("tls://"))
        .custom_inbox_prefix(role.inbox(&config.fleet))
        .connection_timeout(answer)
        .request_timeout(Some(answer)))
}

/// The path of a file that exists.
fn readable(file: &Path) -> Result<std::path::PathBuf, String> {
    match std::fs::File::open(file) {
        Ok(_) => Ok(file.to_owned()),
        Err(error) => Err(format!("the file {} for NATS: {error}", file.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: &str = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY";
    const PUBLIC: &str = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4";

    fn answer(text: &str) -> Auth {
        parse(text).unwrap().answer(b"nonce").unwrap()
    }

    #[test]
    fn each_kind_of_credentials_is_known_by_its_form() {
        assert_eq!(answer("t0ken\n").token.as_deref(), Some("t0ken"));
        let password = answer("host s3cret\n");
        assert_eq!(password.username.as_deref(), Some("host"));
        assert_eq!(password.password.as_deref(), Some("s3cret"));
        let nkey = answer(SEED);
        assert_eq!(nkey.nkey.as_deref(), Some(PUBLIC));
        assert_eq!(nkey.signature.map(|signature| signature.len()), Some(64));
        let creds = format!(
            "-----BEGIN NATS USER JWT-----\na.b.c\n------END NATS USER JWT------\n\n*** IMPORTANT ***\n\
             -----BEGIN USER NKEY SEED-----\n{SEED}\n------END USER NKEY SEED------\n"
        );
        let signed = answer(&creds);
        assert_eq!((signed.jwt.as_deref(), signed.nkey), (Some("a.b.c"), None));
        assert!(signed.signature.is_some());
        let cut = creds.replace("USER NKEY SEED", "SEED");
        for (text, fault) in [
            ("", "a token"),
            ("a b c", "a token"),
            (cut.as_str(), "USER NKEY SEED"),
            (&SEED.replace('C', "D"), "checksum"),
        ] {
            let error = parse(text).err().unwrap();
            assert!(error.contains(fault) && !error.contains("SUAC"), "{error}");
        }
    }
}
