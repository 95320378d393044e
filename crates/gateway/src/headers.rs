//! Validation of request heads, and the header fields that are forwarded.
//!
//! A head that two parsers could interpret differently is rejected, not repaired. Hop-by-hop fields are not forwarded;
//! fields that identify the caller are set by the proxy only.

use std::net::SocketAddr;

use bytes::{BufMut as _, BytesMut};
use hyper::{
    HeaderMap, Method, Version,
    header::{self, HeaderName, HeaderValue},
    http::request::Parts,
};

use crate::{
    auth,
    upstream::{Framing, content_length, has_token},
};

/// Maximum length of the path with its query.
const PATH_MAX: usize = 16 * 1024;

/// Connection of the client that sent a request.
#[derive(Clone, Debug)]
pub struct ClientConnection {
    pub peer: SocketAddr,
    pub https: bool,
    /// Address as a header value, created once for all requests of the connection.
    forwarded_for: HeaderValue,
}

impl ClientConnection {
    pub fn new(peer: SocketAddr, https: bool) -> Self {
        let text = peer.ip().to_canonical().to_string();
        let forwarded_for =
            HeaderValue::from_str(&text).unwrap_or_else(|_| HeaderValue::from_static("unknown"));
        Self { peer, https, forwarded_for }
    }
}

/// Reason for rejecting a head: status and message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadRefusal(pub(crate) u16, pub(crate) &'static str);

/// Parsed contents of a head that is known to be unambiguous.
#[derive(Clone, Debug)]
pub(crate) struct ParsedHead {
    /// Host as written, with the port.
    pub(crate) host: HeaderValue,
    /// Requested protocol of an upgrade.
    pub(crate) upgrade: Option<HeaderValue>,
}

pub(crate) fn parse_head(parts: &Parts) -> Result<ParsedHead, HeadRefusal> {
    if parts.method == Method::CONNECT || parts.method == Method::TRACE {
        return Err(HeadRefusal(405, "CONNECT and TRACE are not supported"));
    }
    let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
    if !path.starts_with('/') {
        return Err(HeadRefusal(400, "the request target must be a path"));
    }
    if path.len() > PATH_MAX {
        return Err(HeadRefusal(414, "the path is longer than 16 KiB"));
    }
    if parts.uri.scheme_str().is_some_and(|scheme| scheme != "http" && scheme != "https") {
        return Err(HeadRefusal(400, "the scheme of the request target must be http or https"));
    }
    check_framing(&parts.headers, parts.version)?;
    Ok(ParsedHead { host: parse_host(parts)?, upgrade: parse_upgrade(parts)? })
}

fn check_framing(headers: &HeaderMap, version: Version) -> Result<(), HeadRefusal> {
    let length = content_length(headers)
        .map_err(|_| HeadRefusal(400, "invalid Content-Length: expected one number"))?;
    let mut encodings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let Some(encoding) = encodings.next() else { return Ok(()) };
    if version != Version::HTTP_11 {
        return Err(HeadRefusal(400, "Transfer-Encoding requires HTTP/1.1"));
    }
    if length.is_some() {
        return Err(HeadRefusal(400, "Content-Length and Transfer-Encoding are mutually exclusive"));
    }
    if encodings.next().is_some() || !encoding.as_bytes().eq_ignore_ascii_case(b"chunked") {
        return Err(HeadRefusal(400, "unsupported Transfer-Encoding: expected `chunked`"));
    }
    Ok(())
}

fn parse_host(parts: &Parts) -> Result<HeaderValue, HeadRefusal> {
    let mut hosts = parts.headers.get_all(header::HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        return Err(HeadRefusal(400, "more than one Host header"));
    }
    let authority = parts.uri.authority().map(|authority| authority.as_str());
    let host = match (authority, host) {
        (Some(authority), Some(host)) if !host.as_bytes().eq_ignore_ascii_case(authority.as_bytes()) => {
            return Err(HeadRefusal(400, "the Host header does not match the request target"));
        }
        (_, Some(host)) => host.clone(),
        (Some(authority), None) => HeaderValue::from_str(authority).map_err(|_| {
            HeadRefusal(400, "invalid host: expected a name or an IP address, with an optional port")
        })?,
        (None, None) => return Err(HeadRefusal(400, "missing Host header")),
    };
    let fine = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b':' | b'[' | b']');
    if host.is_empty() || host.len() > 261 || !host.as_bytes().iter().all(fine) {
        return Err(HeadRefusal(
            400,
            "invalid host: expected a name or an IP address, with an optional port",
        ));
    }
    Ok(host)
}

/// Returns the requested upgrade. It is forwarded only in its simple form: a GET without a body, with one protocol.
/// HTTP/2 is not offered, because it would hide all that follows from the proxy.
fn parse_upgrade(parts: &Parts) -> Result<Option<HeaderValue>, HeadRefusal> {
    let mut requests = parts.headers.get_all(header::UPGRADE).iter();
    let Some(request) = requests.next() else { return Ok(None) };
    let requested =
        parts.headers.get_all(header::CONNECTION).iter().any(|value| has_token(value, b"upgrade"));
    if !requested || parts.version != Version::HTTP_11 {
        return Ok(None);
    }
    if has_token(request, b"h2c") {
        return Ok(None);
    }
    let body = parts.headers.contains_key(header::TRANSFER_ENCODING)
        || parts.headers.get(header::CONTENT_LENGTH).is_some_and(|length| length.as_bytes() != b"0");
    if requests.next().is_some() || parts.method != Method::GET || body {
        return Err(HeadRefusal(400, "an upgrade request must be a GET without a body, for one protocol"));
    }
    Ok(Some(request.clone()))
}

/// Returns the name in a `Host` value without its port, for the lookup.
pub(crate) fn host_name(host: &HeaderValue) -> &str {
    let host = host.to_str().unwrap_or_default();
    if host.starts_with('[') {
        return host.find(']').and_then(|end| host.get(..=end)).unwrap_or(host);
    }
    host.split_once(':').map_or(host, |(name, _)| name)
}

/// Parameters for forwarding a request.
pub(crate) struct ForwardedHeaders<'a> {
    pub(crate) client: &'a ClientConnection,
    pub(crate) head: &'a ParsedHead,
    /// Path and query that the replica receives.
    pub(crate) path: &'a str,
    /// Prefix that was removed from the path.
    pub(crate) prefix: Option<&'a str>,
    pub(crate) framing: Framing,
    /// True if the `Authorization` header was meant for windlass.
    pub(crate) strip_authorization: bool,
    /// Signed identity of the caller.
    pub(crate) identity: Option<&'a HeaderValue>,
}

/// Writes the head of a request to a replica.
pub(crate) fn write_request_head(buffer: &mut BytesMut, parts: &Parts, forwarded: &ForwardedHeaders<'_>) {
    buffer.put_slice(parts.method.as_str().as_bytes());
    buffer.put_u8(b' ');
    buffer.put_slice(forwarded.path.as_bytes());
    buffer.put_slice(b" HTTP/1.1\r\n");
    put_header(buffer, "host", forwarded.head.host.as_bytes());
    let named = parts.headers.get_all(header::CONNECTION);
    // The usual `Connection: keep-alive` names no header field.
    let names_more = named.iter().any(|value| !value.as_bytes().eq_ignore_ascii_case(b"keep-alive"));
    for (name, value) in &parts.headers {
        if is_managed_header(name)
            || (names_more && named.iter().any(|list| has_token(list, name.as_str().as_bytes())))
            || (name == header::AUTHORIZATION
                && (forwarded.strip_authorization || auth::is_windlass_token(value)))
        {
            continue;
        }
        put_header(buffer, name.as_str(), value.as_bytes());
    }
    write_cookies(buffer, &parts.headers);
    put_header(buffer, "x-forwarded-for", forwarded.client.forwarded_for.as_bytes());
    put_header(buffer, "x-forwarded-proto", if forwarded.client.https { b"https" } else { b"http" });
    put_header(buffer, "x-forwarded-host", forwarded.head.host.as_bytes());
    if let Some(prefix) = forwarded.prefix {
        put_header(buffer, "x-forwarded-prefix", prefix.as_bytes());
    }
    if let Some(identity) = forwarded.identity {
        put_header(buffer, auth::IDENTITY_HEADER, identity.as_bytes());
    }
    write_connection(buffer, parts, forwarded);
    match forwarded.framing {
        Framing::None if parts.headers.contains_key(header::CONTENT_LENGTH) => {
            buffer.put_slice(b"content-length: 0\r\n");
        }
        Framing::None | Framing::Close => {}
        Framing::Sized(length) => put_header(buffer, "content-length", length.to_string().as_bytes()),
        Framing::Chunked => buffer.put_slice(b"transfer-encoding: chunked\r\n"),
    }
    buffer.put_slice(b"\r\n");
}

fn write_connection(buffer: &mut BytesMut, parts: &Parts, forwarded: &ForwardedHeaders<'_>) {
    if let Some(upgrade) = &forwarded.head.upgrade {
        buffer.put_slice(b"connection: upgrade\r\n");
        put_header(buffer, "upgrade", upgrade.as_bytes());
    } else if parts.headers.get(header::TE).is_some_and(|te| has_token(te, b"trailers")) {
        buffer.put_slice(b"te: trailers\r\nconnection: te\r\n");
    }
}

/// Writes all cookies except those of windlass as one field; HTTP/2 splits them.
fn write_cookies(buffer: &mut BytesMut, headers: &HeaderMap) {
    let start = buffer.len();
    for value in headers.get_all(header::COOKIE) {
        for cookie in value.as_bytes().split(|b| *b == b';').map(<[u8]>::trim_ascii) {
            if cookie.is_empty() || auth::is_our_cookie(cookie) {
                continue;
            }
            buffer.put_slice(if buffer.len() == start { b"cookie: " } else { b"; " });
            buffer.put_slice(cookie);
        }
    }
    if buffer.len() > start {
        buffer.put_slice(b"\r\n");
    }
}

pub(crate) fn put_header(buffer: &mut BytesMut, name: &str, value: &[u8]) {
    buffer.reserve(name.len() + value.len() + 4);
    buffer.put_slice(name.as_bytes());
    buffer.put_slice(b": ");
    buffer.put_slice(value);
    buffer.put_slice(b"\r\n");
}

/// Returns whether a field is hop-by-hop.
fn is_hop_by_hop(name: &HeaderName) -> bool {
    *name == header::CONNECTION
        || *name == header::TRANSFER_ENCODING
        || *name == header::UPGRADE
        || *name == header::TE
        || matches!(name.as_str(), "keep-alive" | "proxy-connection" | "http2-settings")
}

/// Returns whether a field is never forwarded as received: hop-by-hop fields, and those that the proxy writes itself.
fn is_managed_header(name: &HeaderName) -> bool {
    let text = name.as_str();
    match text.as_bytes() {
        [b'x', b'-', b'f', ..] => text.starts_with("x-forwarded"),
        [b'x', b'-', ..] => text == "x-real-ip" || text.starts_with("x-windlass-"),
        [b'f', ..] => *name == header::FORWARDED,
        _ => {
            is_hop_by_hop(name)
                || *name == header::HOST
                || *name == header::COOKIE
                || *name == header::CONTENT_LENGTH
                || *name == header::EXPECT
                || *name == header::PROXY_AUTHORIZATION
        }
    }
}

/// Returns whether a trailer may be forwarded: none for framing, routing or authentication.
pub(crate) fn is_forwardable_trailer(name: &HeaderName) -> bool {
    !is_managed_header(name)
        && *name != header::AUTHORIZATION
        && *name != header::SET_COOKIE
        && *name != header::TRAILER
        && *name != header::CACHE_CONTROL
        && !name.as_str().starts_with("content-")
}

/// Removes hop-by-hop fields from a response, and those that only windlass may set.
pub(crate) fn clean_response(headers: &mut HeaderMap) {
    let is_clean =
        |name: &HeaderName| !is_hop_by_hop(name) && *name != header::ALT_SVC && *name != header::SET_COOKIE;
    // The common case. One pass over all fields costs less than a lookup of each of these.
    if headers.keys().all(is_clean) {
        return;
    }
    if let Some(connection) = headers.get(header::CONNECTION) {
        if !connection.as_bytes().eq_ignore_ascii_case(b"keep-alive") {
            let named: Vec<HeaderName> = headers
                .get_all(header::CONNECTION)
                .iter()
                .flat_map(|value| value.as_bytes().split(|b| *b == b','))
                .filter_map(|word| HeaderName::from_bytes(word.trim_ascii()).ok())
                // A `Connection` header must not remove the framing.
                .filter(|name| *name != header::CONTENT_LENGTH)
                .collect();
            for name in named {
                headers.remove(name);
            }
        }
        headers.remove(header::CONNECTION);
    }
    headers.remove(header::TRANSFER_ENCODING);
    headers.remove(header::UPGRADE);
    headers.remove("keep-alive");
    headers.remove("proxy-connection");
    headers.remove(header::ALT_SVC);
    if headers.contains_key(header::SET_COOKIE) {
        drop_our_cookies(headers);
    }
}

/// Removes cookies with the prefix of windlass: a service must not set session cookies.
fn drop_our_cookies(headers: &mut HeaderMap) {
    let ours = |value: &HeaderValue| auth::is_our_cookie(value.as_bytes().trim_ascii_start());
    if !headers.get_all(header::SET_COOKIE).iter().any(ours) {
        return;
    }
    if let header::Entry::Occupied(entry) = headers.entry(header::SET_COOKIE) {
        let kept: Vec<HeaderValue> = entry.remove_entry_mult().1.filter(|value| !ours(value)).collect();
        for value in kept {
            headers.append(header::SET_COOKIE, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper::Request;
    use proptest::prelude::*;

    use super::*;

    fn parts(method: &str, uri: &str, fields: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn passed(fields: &[(&str, &str)], ours: bool) -> String {
        let parts = parts("GET", "/a?b=c", fields);
        let requested = parse_head(&parts).unwrap();
        let origin = ClientConnection::new("192.0.2.1:5".parse().unwrap(), true);
        let mut buffer = BytesMut::new();
        let forwarded = ForwardedHeaders {
            client: &origin,
            head: &requested,
            path: "/b?b=c",
            prefix: Some("/a"),
            framing: Framing::None,
            strip_authorization: ours,
            identity: None,
        };
        write_request_head(&mut buffer, &parts, &forwarded);
        String::from_utf8(buffer.to_vec()).unwrap().replace("\r\n", "\n")
    }

    const TAIL: &str = "x-forwarded-for: 192.0.2.1\nx-forwarded-proto: https\nx-forwarded-host: h:8\n\
                        x-forwarded-prefix: /a\n";

    #[test]
    fn forwarded_and_identity_headers_from_clients_are_not_passed_on() {
        let text = passed(
            &[
                ("host", "h:8"),
                ("x-forwarded-for", "10.0.0.1"),
                ("x-forwarded-prefix", "/evil"),
                ("x-forwarded-anything", "1"),
                ("forwarded", "for=10.0.0.1"),
                ("x-real-ip", "10.0.0.1"),
                ("x-windlass-identity", "root"),
                ("x-fine", "1"),
                ("accept", "*/*"),
            ],
            false,
        );
        assert_eq!(text, format!("GET /b?b=c HTTP/1.1\nhost: h:8\nx-fine: 1\naccept: */*\n{TAIL}\n"));
    }

    #[test]
    fn hop_by_hop_request_headers_are_not_forwarded() {
        let text = passed(
            &[
                ("host", "h:8"),
                ("connection", "close, X-Secret"),
                ("connection", "keep-alive"),
                ("x-secret", "1"),
                ("keep-alive", "5"),
                ("proxy-authorization", "x"),
                ("expect", "100-continue"),
                ("te", "trailers"),
                ("upgrade", "h2c"),
                ("http2-settings", "AAMAAABkAAQAAP__"),
            ],
            false,
        );
        let expect = format!("GET /b?b=c HTTP/1.1\nhost: h:8\n{TAIL}te: trailers\nconnection: te\n\n");
        assert_eq!(text, expect);
    }

    #[test]
    fn windlass_credentials_are_not_forwarded_to_replicas() {
        let fields = [
            ("host", "h:8"),
            ("authorization", "Bearer theirs"),
            ("cookie", "a=1; __Host-windlass-session=s; b=2"),
            ("cookie", "c=3"),
        ];
        let text = passed(&fields, false);
        assert!(text.contains("authorization: Bearer theirs\ncookie: a=1; b=2; c=3\n"), "{text}");
        assert!(!passed(&fields, true).contains("authorization"));
        let ours = [("host", "h:8"), ("authorization", "bearer wl_abc")];
        assert!(!passed(&ours, false).contains("authorization"));
    }

    #[test]
    fn an_ambiguous_request_head_is_rejected() {
        let refused = |method: &str, uri: &str, fields: &[(&str, &str)]| {
            parse_head(&parts(method, uri, fields)).err().map(|refusal| refusal.0)
        };
        assert_eq!(refused("GET", "/", &[("host", "a")]), None);
        assert_eq!(refused("GET", "http://a/", &[("host", "a")]), None);
        assert_eq!(refused("GET", "http://b/", &[("host", "a")]), Some(400));
        assert_eq!(refused("GET", "/", &[("host", "a"), ("host", "a")]), Some(400));
        assert_eq!(refused("GET", "/", &[]), Some(400));
        assert_eq!(refused("GET", "/", &[("host", "a@b")]), Some(400));
        assert_eq!(refused("GET", "/", &[("host", "")]), Some(400));
        assert_eq!(refused("OPTIONS", "*", &[("host", "a")]), Some(400));
        assert_eq!(refused("CONNECT", "a:1", &[("host", "a:1")]), Some(405));
        assert_eq!(refused("TRACE", "/", &[("host", "a")]), Some(405));
        let te = |value| refused("POST", "/", &[("host", "a"), ("transfer-encoding", value)]);
        assert_eq!((te("chunked"), te("Chunked")), (None, None));
        assert_eq!(
            (te("gzip, chunked"), te("xchunked"), te("chunked;q=1")),
            (Some(400), Some(400), Some(400))
        );
        let both = [("host", "a"), ("transfer-encoding", "chunked"), ("content-length", "4")];
        assert_eq!(refused("POST", "/", &both), Some(400));
        let ws = [("host", "a"), ("connection", "Upgrade"), ("upgrade", "websocket")];
        assert_eq!(refused("GET", "/", &ws), None);
        assert_eq!(refused("POST", "/", &ws), Some(400));
    }

    #[test]
    fn hop_by_hop_headers_and_session_cookies_are_removed_from_responses() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, x-hop, content-length"),
            ("x-hop", "1"),
            ("content-length", "3"),
            ("keep-alive", "1"),
            ("alt-svc", "h3=\":1\""),
            ("set-cookie", "a=1"),
            ("set-cookie", "__host-Windlass-session=evil"),
            ("set-cookie", "b=2"),
        ] {
            headers.append(name, value.parse().unwrap());
        }
        clean_response(&mut headers);
        let text: Vec<String> =
            headers.iter().map(|(name, value)| format!("{name}={}", value.to_str().unwrap())).collect();
        assert_eq!(text, ["content-length=3", "set-cookie=a=1", "set-cookie=b=2"]);
    }

    const NAMES: &[&str] = &[
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "upgrade",
        "te",
        "trailer",
        "forwarded",
        "authorization",
        "x-forwarded-for",
        "x-windlass-user",
        "cookie",
        "expect",
        "x",
    ];
    const VALUES: &[&str] = &[
        "a.test",
        "a.test:80",
        "b.test",
        "[::1]",
        "a b",
        "@",
        "0",
        "5",
        "+5",
        "5, 5",
        "chunked",
        "Chunked",
        "gzip, chunked",
        "close",
        "upgrade",
        "Upgrade, keep-alive",
        "host",
        "websocket",
        "h2c",
        "",
        "100-continue",
        "Bearer wl_x",
        "\t",
    ];

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: windlass_testkit::fuzz_cases(),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Checks that the forwarded head is one request to one host, for any head that a client may send.
        #[test]
        fn fuzz_of_request_heads(
            fields in prop::collection::vec((prop::sample::select(NAMES), prop::sample::select(VALUES)), 0..12),
            method in prop::sample::select(&["GET", "POST", "CONNECT", "TRACE"][..]),
            uri in prop::sample::select(&["/", "/a?b=c", "*", "http://a.test/x", "ftp://a.test/", "//x/y", "/%00"][..]),
        ) {
            let parts = parts(method, uri, &fields);
            let Ok(requested) = parse_head(&parts) else { return Ok(()) };
            let _ = host_name(&requested.host);
            let origin = ClientConnection::new("192.0.2.1:5".parse().unwrap(), true);
            let mut buffer = BytesMut::new();
            let (path, framing) = ("/b", Framing::None);
            let forwarded =
                ForwardedHeaders { client: &origin, head: &requested, path, prefix: None, framing, strip_authorization: true, identity: None };
            write_request_head(&mut buffer, &parts, &forwarded);
            let head = String::from_utf8_lossy(&buffer).to_lowercase();
            prop_assert_eq!(head.matches("\r\nhost:").count(), 1, "{}", head);
            prop_assert!(head.find("\r\n\r\n").is_none_or(|at| at + 4 == head.len()), "{}", head);
            // In other fields the same value is not a credential.
            prop_assert!(!head.contains("\r\nauthorization: bearer wl_x"), "{}", head);
            prop_assert!(!head.contains("\r\ntransfer-encoding:"), "{}", head);
        }
    }
}
