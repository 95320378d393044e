//! The web UI: files that are part of the binary, below `/ui/`.
//!
//! Files are built by `npm run build` in `web` and committed with two compressed forms each, so that neither the build
//! nor a request compresses anything.

use axum::{
    Router,
    body::Body,
    extract::{Path, Request},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::Response,
    routing::get,
};

use crate::{
    http::not_found,
    ui_assets::{ASSETS, Asset, VERSION},
};

/// Page of every address below `/ui/` that is not a file.
const INDEX: &str = "index.html";
/// Directory of files whose names contain a hash of their content.
const HASHED: &str = "assets/";

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; \
     connect-src 'self'; worker-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; \
     frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types svelte-trusted-html windlass";

/// Headers of every response.
const SECURITY: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Routes of the UI; `/` redirects browsers to it.
pub(crate) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    tracing::debug!(version = VERSION, "serving the web UI");
    Router::new()
        .route("/", get(root))
        .route("/ui", get(|| async { redirect() }))
        .route("/ui/", get(|request: Request| async move { respond(INDEX, request.headers()) }))
        .route(
            "/ui/{*path}",
            get(
                |Path(path): Path<String>, request: Request| async move { respond(&path, request.headers()) },
            ),
        )
}

/// Redirects browsers. Other clients get the 404 of the API.
async fn root(request: Request) -> Response {
    let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    if accept.is_some_and(|accept| accept.contains("text/html")) { redirect() } else { not_found() }
}

fn redirect() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::TEMPORARY_REDIRECT;
    response.headers_mut().insert(header::LOCATION, HeaderValue::from_static("/ui/"));
    response
}

fn find(path: &str) -> Option<&'static Asset> {
    let at = ASSETS.binary_search_by(|asset| asset.path.cmp(path)).ok()?;
    ASSETS.get(at)
}

fn respond(path: &str, headers: &HeaderMap) -> Response {
    let asset = match find(path) {
        Some(asset) => asset,
        // A page that asks for a part of another build must not receive a document.
        None if path.starts_with(HASHED) => return not_found(),
        None => match find(INDEX) {
            Some(asset) => asset,
            None => return not_found(),
        },
    };
    let etag = format!("\"{}\"", asset.sha256);
    let (body, encoding) = choose_encoding(asset, headers);
    let mut response = if matches_etag(headers, &etag) {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response
    } else {
        let mut response = Response::new(Body::from(body));
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(asset.content_type));
        if let Some(encoding) = encoding {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(encoding));
        }
        response
    };
    let headers = response.headers_mut();
    let cache =
        if asset.path.starts_with(HASHED) { "public, max-age=31536000, immutable" } else { "no-cache" };
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(cache));
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    if let Ok(etag) = HeaderValue::from_str(&etag) {
        headers.insert(header::ETAG, etag);
    }
    for (name, value) in SECURITY {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Compares weakly: proxies that compress weaken the tag.
fn matches_etag(headers: &HeaderMap, etag: &str) -> bool {
    let tags = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    tags.flat_map(|value| value.split(','))
        .map(|tag| tag.trim().trim_start_matches("W/"))
        .any(|tag| tag == etag || tag == "*")
}

fn choose_encoding(asset: &'static Asset, headers: &HeaderMap) -> (&'static [u8], Option<&'static str>) {
    if accepts(headers, "br") {
        (asset.brotli, Some("br"))
    } else if accepts(headers, "gzip") {
        (asset.gzip, Some("gzip"))
    } else {
        (asset.plain, None)
    }
}

/// Returns whether `Accept-Encoding` lists the encoding with a weight above zero.
fn accepts(headers: &HeaderMap, encoding: &str) -> bool {
    let values = headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|item| {
        let (name, weight) = item.split_once(';').unwrap_or((item, ""));
        let weight = weight.trim().strip_prefix("q=").map_or(Ok(1.0), str::parse::<f32>);
        name.trim().eq_ignore_ascii_case(encoding) && weight.is_ok_and(|weight| weight > 0.0)
    })
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, header};

    use super::{ASSETS, INDEX, VERSION, accepts, find};

    #[test]
    fn files_are_sorted_and_the_page_loads_the_entry_script() {
        assert!(ASSETS.windows(2).all(|pair| pair[0].path < pair[1].path));
        let page = std::str::from_utf8(find(INDEX).unwrap().plain).unwrap();
        assert!(page.contains(&format!("/ui/assets/{VERSION}")), "{page}");
        assert!(find(&format!("assets/{VERSION}")).is_some());
    }

    #[test]
    fn an_encoding_is_used_only_if_the_client_accepts_it() {
        for (value, br, gzip) in [
            ("gzip, deflate, br", true, true),
            ("gzip;q=0.5, br;q=0", false, true),
            ("GZIP", false, true),
            ("identity", false, false),
            ("brotli, xgzip", false, false),
        ] {
            let headers = HeaderMap::from_iter([(header::ACCEPT_ENCODING, value.parse().unwrap())]);
            assert_eq!((accepts(&headers, "br"), accepts(&headers, "gzip")), (br, gzip), "{value}");
        }
    }
}
