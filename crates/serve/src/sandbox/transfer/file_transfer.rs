//! Whole files of a sandbox by plain HTTP, in the shape of the E2B agent: reads, uploads and forms,
//! compressed or not.
//!
//! Promises: an upload is stored whole or not at all. Bytes of a compressed upload count in the
//! memory of requests before they are kept, and there are at most as many as of a plain one.

use std::io::{Read, Write};
use std::sync::Arc;

use afresh::files::{Kind, Refused, Time};
use axum::Extension;
use axum::body::Body;
use axum::extract::{FromRequest, Request, State};
use axum::response::Response;
use bytes::Bytes;
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use hyper::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use crate::body::{Meter, StreamedAnswer};
use crate::error_response::ErrorResponse;
use crate::sandbox::http::response::{Answer, answer};
use crate::sandbox::http::signature::FileAccess;
use crate::sandbox::http::user::User;
use crate::sandbox::lifecycle::registry::Sandboxes;
use crate::sandbox::lifecycle::sandbox::Sandbox;
use crate::sandbox::lifecycle::tasks::blocking;
use crate::sandbox::request_body::multipart::{self, FormError};
use crate::sandbox::transfer::file_body::{FileBody, MAX_PIECE_BYTES};
use crate::sandbox::transfer::file_entry::{absolute, check_path, name, refused};
use crate::sandbox::transfer::file_metadata::{self, FileMetadata};

type All = State<Arc<Sandboxes>>;

/// Maximum bytes of a file that is sent.
const MAX_READ_BYTES: u64 = 1 << 30;
/// Maximum bytes of a file that is sent compressed: it is compressed as a whole.
const MAX_COMPRESSED: u64 = 16 << 20;
/// Maximum bytes of metadata in an answer to uploads: each file has all of it.
const MAX_METADATA_BYTES: usize = 1 << 20;
/// Bytes that are decompressed at once.
const DECODED_PIECE: usize = 64 << 10;

/// Whether the client asks for gzip, and for nothing else: clients in general accept it, and it
/// takes time.
fn wants_gzip(headers: &HeaderMap) -> bool {
    headers.get(ACCEPT_ENCODING).is_some_and(|encoding| encoding == "gzip")
}

/// Gives a whole file.
pub(crate) async fn read(
    State(all): All,
    meter: Option<Extension<Meter>>,
    file: FileAccess,
    headers: HeaderMap,
) -> Answer {
    let path = absolute(&file.path.unwrap_or_default(), file.user);
    let zips = wants_gzip(&headers);
    let (this, own) = (all.clone(), file.sandbox.clone());
    let found = all.tree(&file.sandbox, move |tree| {
        let refuse = |error| refused(&path, &error);
        if tree.stat_path(&path).map_err(refuse)?.kind != Kind::File {
            let error =
                if tree.find(&path).is_ok() { Refused::IsDirectory } else { Refused::Missing };
            return Err(refuse(error));
        }
        let node = tree.find(&path).map_err(refuse)?;
        let size = tree.stat(node).map_err(refuse)?.size;
        if size > MAX_READ_BYTES {
            return Err(refuse(Refused::TooLarge));
        }
        if zips && size <= MAX_COMPRESSED {
            // The compressed file takes as much at most, for a moment together with the plain one.
            if meter.is_some_and(|Extension(meter)| !meter.add(2 * size as usize)) {
                return Err(ErrorResponse::no_memory());
            }
            let plain = tree.read_path(&path, MAX_COMPRESSED).map_err(refuse)?;
            return Ok((Body::from(compressed(&plain)?), true));
        }
        if size <= MAX_PIECE_BYTES {
            return Ok((
                Body::from(tree.read_path(&path, MAX_PIECE_BYTES).map_err(refuse)?),
                false,
            ));
        }
        let most = this.template_of(&own).config.files;
        let admit = |bytes| this.check_memory(&own.tenant, bytes);
        let download = own.charge.downloads.begin(tree, node, most, admit)?;
        Ok((Body::new(FileBody::new(download, size)), false))
    });
    let (body, zipped) = found.await?;
    let whole =
        http_body::Body::size_hint(&body).exact().is_some_and(|size| size <= MAX_PIECE_BYTES);
    let mut response = Response::new(body);
    if !whole {
        response.extensions_mut().insert(StreamedAnswer);
    }
    if zipped {
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    let kind = HeaderValue::from_static("application/octet-stream");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

fn compressed(plain: &[u8]) -> Result<Vec<u8>, ErrorResponse> {
    let mut to = GzEncoder::new(Vec::new(), Compression::fast());
    let done = to.write_all(plain).and_then(|()| to.finish());
    done.map_err(|error| crate::failure::internal(&error))
}

/// Decompresses a body, to at most `most` bytes.
fn decompressed(body: &[u8], most: usize, meter: Option<&Meter>) -> Result<Bytes, ErrorResponse> {
    let mut from = MultiGzDecoder::new(body);
    let mut plain = Vec::new();
    let mut piece = vec![0; DECODED_PIECE];
    loop {
        let length = from.read(&mut piece).map_err(|error| {
            let message =
                format!("the body is not compressed as its content-encoding says: {error}");
            ErrorResponse::new(StatusCode::BAD_REQUEST, message)
        })?;
        if length == 0 {
            return Ok(plain.into());
        }
        if plain.len() + length > most {
            return Err(ErrorResponse::too_large(most));
        }
        // The list may grow to twice its bytes.
        if meter.is_some_and(|meter| !meter.add(2 * length)) {
            return Err(ErrorResponse::no_memory());
        }
        plain.extend_from_slice(&piece[..length]);
    }
}

/// Keeps whole files: one that is the body, or those of a form, each with its path as its name.
pub(crate) async fn write(State(all): All, file: FileAccess, request: Request) -> Answer {
    let metadata = file_metadata::read(request.headers())?;
    let encoding = request.headers().get(CONTENT_ENCODING).cloned();
    let zipped = match encoding.as_ref().map(HeaderValue::as_bytes) {
        None | Some(b"identity") => false,
        Some(b"gzip") => true,
        Some(_) => {
            let message = "a file comes as it is or with the content-encoding gzip";
            return Err(ErrorResponse::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
    };
    let request = match zipped {
        true => plain(request, all.config.max_body).await?,
        false => request,
    };
    let kind = request.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let form = kind.filter(|kind| kind.starts_with("multipart/form-data")).map(str::to_owned);
    if let Some(kind) = form {
        let boundary = multipart::boundary(&kind).map_err(broken)?;
        let body = Bytes::from_request(request, &()).await.map_err(too_large)?;
        let files =
            blocking(move || form_files(&body, &boundary, file.path.as_deref(), file.user)).await?;
        return keep(&all, &file.sandbox, files, metadata).await;
    }
    let path = file.path.ok_or_else(|| {
        ErrorResponse::new(StatusCode::BAD_REQUEST, "`path` must be the path of the file")
    })?;
    let bytes = Bytes::from_request(request, &()).await.map_err(too_large)?;
    let files = vec![(absolute(&path, file.user), bytes)];
    keep(&all, &file.sandbox, files, metadata).await
}

/// A request with its body decompressed.
async fn plain(request: Request, most: usize) -> Result<Request, ErrorResponse> {
    let (mut parts, body) = request.into_parts();
    let meter = parts.extensions.get::<Meter>().cloned();
    parts.headers.remove(CONTENT_ENCODING);
    // An extractor without the extensions of the request has the default limit of axum, 2 MiB.
    let body = axum::body::to_bytes(body, most).await.map_err(too_large)?;
    let plain = blocking(move || decompressed(&body, most, meter.as_ref())).await?;
    Ok(Request::from_parts(parts, Body::from(plain)))
}

fn too_large(error: impl std::fmt::Display) -> ErrorResponse {
    ErrorResponse::new(StatusCode::PAYLOAD_TOO_LARGE, error.to_string())
}

fn broken(error: FormError) -> ErrorResponse {
    let status = match error {
        FormError::Files | FormError::Names => StatusCode::PAYLOAD_TOO_LARGE,
        _ => StatusCode::BAD_REQUEST,
    };
    ErrorResponse::new(status, format!("the form is broken: {error}"))
}

/// The files of a form, which share its bytes. A query can name the only one: the path of a query
/// would be copied for each of several.
fn form_files(
    body: &Bytes,
    boundary: &str,
    path: Option<&str>,
    user: User,
) -> Result<Vec<(String, Bytes)>, ErrorResponse> {
    let bad = |message: String| ErrorResponse::new(StatusCode::BAD_REQUEST, message);
    let file = |file: multipart::FormFile| {
        let named = path.map(str::to_owned).or(file.name);
        let named =
            named.ok_or_else(|| bad("the form is broken: a file has no name".to_owned()))?;
        check_path(&named)?;
        Ok((absolute(&named, user), body.slice(file.content)))
    };
    let files = multipart::files(body, boundary).map_err(broken)?;
    if path.is_some() && files.len() != 1 {
        let count = files.len();
        return Err(bad(format!(
            "the query names one path and the form has {count} files; send one file, or name each in the form"
        )));
    }
    files.into_iter().map(file).collect()
}

/// The metadata in the answer, which repeats it for each of `count` files.
fn shown_metadata(metadata: &FileMetadata, count: usize) -> Result<Option<Value>, ErrorResponse> {
    if metadata.is_empty() {
        return Ok(None);
    }
    let shown = json!(metadata);
    if shown.to_string().len().saturating_mul(count) > MAX_METADATA_BYTES {
        return Err(too_large(format!(
            "the metadata of {count} files has more than {MAX_METADATA_BYTES} bytes: send fewer \
             files, or shorter headers"
        )));
    }
    Ok(Some(shown))
}

async fn keep(
    all: &Arc<Sandboxes>,
    sandbox: &Arc<Sandbox>,
    files: Vec<(String, Bytes)>,
    metadata: FileMetadata,
) -> Answer {
    let own = sandbox.clone();
    let shown = shown_metadata(&metadata, files.len())?;
    let written = all
        .files(sandbox, move |tree| {
            let (mut written, mut created) = (Vec::new(), Vec::new());
            // All of them or none.
            let mut changed = tree.clone();
            for (path, bytes) in &files {
                let is_new = changed.find(path).is_err();
                let put = changed.write_path(path, bytes, Time::now());
                let put = put.and_then(|node| {
                    file_metadata::set(&mut changed, node, &metadata)?;
                    Ok(node)
                });
                let node = put.map_err(|error| refused(path, &error))?;
                created.extend(is_new.then_some(node));
                let mut said = json!({"path": path, "name": name(path), "type": "file"});
                if let Some(shown) = &shown {
                    said["metadata"] = shown.clone();
                }
                written.push(said);
            }
            *tree = changed;
            own.watchers.add_uploaded(created);
            Ok(written)
        })
        .await?;
    Ok(answer(StatusCode::OK, &Value::Array(written)))
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::body_shares::BodyShares;
    use crate::budget::Budget;

    #[test]
    fn a_path_of_the_query_is_for_one_file_of_a_form() {
        let part = |name: &str| {
            format!("--b\r\nContent-Disposition: form-data; filename=\"{name}\"\r\n\r\nx\r\n")
        };
        let form = |parts: &str| Bytes::from(format!("{parts}--b--"));
        let one = form(&part("a"));
        let files = form_files(&one, "b", Some("/named"), User::User).unwrap();
        assert_eq!(files, [("/named".to_owned(), Bytes::from_static(b"x"))]);
        // 10,000 copies of a long path are 600 MB, from 70 KB.
        for parts in [String::new(), part("a").repeat(2), "--b\r\n\r\n\r\n".repeat(10_000)] {
            let refused = form_files(&form(&parts), "b", Some("/named"), User::User).unwrap_err();
            assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{}", refused.message);
        }
        assert_eq!(
            form_files(&form(&part("a").repeat(2)), "b", None, User::User).unwrap().len(),
            2
        );
        let long = "x".repeat(4096);
        assert!(form_files(&form(&part(&long)), "b", None, User::User).is_err());
        assert!(form_files(&form(&part(&long[1..])), "b", None, User::User).is_ok());
    }

    #[test]
    fn the_metadata_of_all_files_of_a_form_has_a_limit() {
        let metadata = FileMetadata::from([("a".to_owned(), "x".repeat(4095))]);
        assert_eq!(shown_metadata(&metadata, 1).unwrap().unwrap()["a"], "x".repeat(4095));
        assert!(shown_metadata(&metadata, 200).is_ok());
        let refused = shown_metadata(&metadata, 10_000).unwrap_err();
        assert_eq!(refused.status, StatusCode::PAYLOAD_TOO_LARGE);
        assert_eq!(shown_metadata(&FileMetadata::new(), 10_000).unwrap(), None);
    }

    #[tokio::test]
    async fn a_compressed_body_has_the_limit_of_a_plain_one() {
        // Bytes that gzip cannot shrink.
        let mut digest = Sha256::digest(b"");
        let mut random = Vec::new();
        while random.len() < 3 << 20 {
            digest = Sha256::digest(digest);
            random.extend_from_slice(&digest);
        }
        let zipped = compressed(&random).unwrap();
        assert!(zipped.len() > 3 << 20);
        let unzip = async |most| {
            let request = Request::builder().header(CONTENT_ENCODING, "gzip");
            plain(request.body(Body::from(zipped.clone())).unwrap(), most).await
        };
        let request = unzip(4 << 20).await.unwrap();
        assert!(request.headers().get(CONTENT_ENCODING).is_none());
        assert!(axum::body::to_bytes(request.into_body(), 4 << 20).await.unwrap() == random);
        assert_eq!(unzip(3 << 20).await.unwrap_err().status.as_u16(), 413);
    }

    #[test]
    fn a_compressed_body_takes_no_more_memory_than_it_may() {
        let plain = vec![b'x'; 1 << 20];
        let zipped = compressed(&plain).unwrap();
        assert!(zipped.len() < 1 << 14);
        assert!(decompressed(&zipped, 1 << 20, None).unwrap() == plain);
        let refused = |most, budget: usize| {
            let meter = Meter::new(&BodyShares::new(&Budget::new(4 * budget)), 1);
            decompressed(&zipped, most, Some(&meter)).unwrap_err().status.as_u16()
        };
        assert_eq!(refused((1 << 20) - 1, 4 << 20), 413);
        assert_eq!(refused(1 << 20, 1 << 20), 503);
        assert_eq!(decompressed(b"no", 10, None).unwrap_err().status.as_u16(), 400);
    }
}
