//! HTTPS, by rustls.
//!
//! Promises: the certificate and key are read, and refused with the cause, when the server starts
//! and when it reloads; a client that stalls in the handshake is given up as one that stalls in the
//! head of a request.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

use crate::error::ServeError;

/// The files that HTTPS needs.
#[derive(Clone, Debug)]
pub struct TlsConfig {
    /// The certificate, and those that lead to the one that clients know, as PEM.
    pub certificate: PathBuf,
    /// Its private key, as PEM.
    pub key: PathBuf,
}

/// Shakes hands. Clones share the certificate.
#[derive(Clone)]
pub(crate) struct Acceptor(Arc<RwLock<TlsAcceptor>>);

impl Acceptor {
    pub(crate) fn open(config: &TlsConfig) -> Result<Self, ServeError> {
        let failed =
            |path: &PathBuf, source: afresh::Cause| ServeError::Tls { path: path.clone(), source };
        let (certificate, key) = (&config.certificate, &config.key);
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect)
            .map_err(|error| failed(certificate, error.into()))?;
        if chain.is_empty() {
            return Err(failed(certificate, "there is no certificate in it".into()));
        }
        let private =
            PrivateKeyDer::from_pem_file(key).map_err(|error| failed(key, error.into()))?;
        let provider = Arc::new(tokio_rustls::rustls::crypto::aws_lc_rs::default_provider());
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|server| server.with_no_client_auth().with_single_cert(chain, private))
            .map_err(|error| failed(key, error.into()))?;
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(Arc::new(RwLock::new(TlsAcceptor::from(Arc::new(server))))))
    }

    fn current(&self) -> TlsAcceptor {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// New handshakes use the other certificate. Open connections keep theirs.
    pub(crate) fn renew(&self, other: &Self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = other.current();
    }

    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
        time: Duration,
    ) -> io::Result<TlsStream<TcpStream>> {
        match tokio::time::timeout(time, self.current().accept(stream)).await {
            Ok(accepted) => accepted,
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}
