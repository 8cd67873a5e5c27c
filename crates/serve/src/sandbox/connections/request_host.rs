//! The `Host` of requests to the programs of a sandbox, where its client has set one.

use hyper::StatusCode;
use hyper::header::HeaderValue;

use crate::error_response::ErrorResponse;

/// Maximum bytes of a `Host` that a sandbox has for its programs.
const MAX_HOST: usize = 255;

/// The `Host` of requests to a port.
pub(crate) fn host_of(host: &str, port: u16) -> Option<HeaderValue> {
    HeaderValue::from_str(&host.replace("${PORT}", &port.to_string())).ok()
}

/// Refuses a `Host` that a header cannot have.
pub(crate) fn check_host(host: Option<&str>) -> Result<(), ErrorResponse> {
    let Some(host) = host else { return Ok(()) };
    let fits = host_of(host, 0).is_some_and(|host| !host.is_empty() && host.len() <= MAX_HOST);
    if fits && !host.contains(char::is_whitespace) {
        return Ok(());
    }
    let message = format!("`network.maskRequestHost` is a host name of at most {MAX_HOST} bytes");
    Err(ErrorResponse::new(StatusCode::BAD_REQUEST, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_host_has_the_port_and_fits_into_a_header() {
        assert_eq!(host_of("a.example:${PORT}", 8000).unwrap(), "a.example:8000");
        assert!(check_host(None).is_ok() && check_host(Some("a.example")).is_ok());
        for wrong in ["", "a b", "a\nb", &"a".repeat(MAX_HOST + 1)] {
            assert!(check_host(Some(wrong)).is_err(), "{wrong:?}");
        }
    }
}
