//! TLS on both sides of a proxied connection.
//!
//! Promises: a client gets a certificate only if it asks for the host by name (SNI). A server is
//! verified for the name that the guest connected to. Both speak HTTP/1.1, or nothing.

use std::sync::{Arc, OnceLock};

use rustls::crypto::CryptoProvider;
use rustls::pki_types::ServerName;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};

use crate::authority::Authority;

/// The protocol for ALPN.
const PROTOCOL: &[u8] = b"http/1.1";

/// The certificate of one host, for clients that ask for it by name.
#[derive(Debug)]
struct OneHost {
    name: String,
    key: Arc<CertifiedKey>,
}

impl ResolvesServerCert for OneHost {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let asked = hello.server_name()?;
        asked.eq_ignore_ascii_case(&self.name).then(|| Arc::clone(&self.key))
    }
}

/// The authorities that this host trusts.
fn host_roots() -> Result<Arc<RootCertStore>, String> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    if let Some(roots) = ROOTS.get() {
        return Ok(Arc::clone(roots));
    }
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return Err("this host has no trusted certificates; install ca-certificates, or set `ca`"
            .to_owned());
    }
    Ok(Arc::clone(ROOTS.get_or_init(|| Arc::new(roots))))
}

fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    Arc::clone(PROVIDER.get_or_init(|| Arc::new(rustls::crypto::aws_lc_rs::default_provider())))
}

/// The side of a guest that connects to `host`.
pub(crate) fn guest_side(authority: &Authority, host: &str) -> Result<ServerConnection, String> {
    let key = authority.certify(host).map_err(|error| error.to_string())?;
    let builder =
        ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| error.to_string())?.with_no_client_auth();
    let mut config = builder.with_cert_resolver(Arc::new(OneHost { name: host.to_owned(), key }));
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    ServerConnection::new(Arc::new(config)).map_err(|error| error.to_string())
}

/// The side of the server `host`, which is verified with `roots`, or with those of this host.
pub(crate) fn server_side(
    host: &str,
    roots: Option<&Arc<RootCertStore>>,
) -> Result<ClientConnection, String> {
    let roots = match roots {
        Some(roots) => Arc::clone(roots),
        None => host_roots()?,
    };
    let name = ServerName::try_from(host.to_owned()).map_err(|error| error.to_string())?;
    let builder =
        ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| error.to_string())?;
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    ClientConnection::new(Arc::new(config), name).map_err(|error| error.to_string())
}
