//! Ambiguous requests for tests, with the behaviour of this proxy and of nginx.
//!
//! A replica must never receive `/smuggled`. Each case that differs from nginx states why.

/// Valid request, the last one on its connection.
pub const LAST: &str = "GET /last HTTP/1.1\r\nHost: llm.test\r\nConnection: close\r\n\r\n";
/// Request that must never reach a replica.
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: llm.test\r\nContent-Length: 0\r\n\r\n";

/// Bytes that a caller sends, and the expected outcome.
#[derive(Debug)]
pub struct Case {
    pub name: &'static str,
    pub bytes: String,
    /// Statuses that the caller receives, then the requests that the replica receives.
    pub ours: &'static str,
    pub nginx: &'static str,
    /// Reason for the difference.
    pub reason: &'static str,
}

/// Case with the same outcome in both.
fn same_as_nginx(name: &'static str, bytes: impl Into<String>, ours: &'static str) -> Case {
    Case { name, bytes: bytes.into(), ours, nginx: ours, reason: "" }
}

fn unlike_nginx(
    name: &'static str,
    bytes: impl Into<String>,
    ours: &'static str,
    nginx: &'static str,
    why: &'static str,
) -> Case {
    Case { name, bytes: bytes.into(), ours, nginx, reason: why }
}

fn post(fields: &str, body: &str) -> String {
    format!("POST /first HTTP/1.1\r\nHost: llm.test\r\n{fields}\r\n\r\n{body}")
}

fn get(fields: &str) -> String {
    format!("GET /first HTTP/1.1\r\nHost: llm.test\r\n{fields}\r\n\r\n")
}

pub fn corpus() -> Vec<Case> {
    let chunked_smuggle = format!("0\r\n\r\n{SMUGGLED}");
    vec![
        same_as_nginx("honest", get("X: y"), "200 200 | GET /first, GET /last"),
        unlike_nginx(
            "CL.TE",
            post("Content-Length: 6\r\nTransfer-Encoding: chunked", &chunked_smuggle),
            "200 | POST /first",
            "400 | ",
            "the standard allows it: the length is ignored, the encoding counts, and the connection is closed",
        ),
        unlike_nginx(
            "TE.CL",
            post("Transfer-Encoding: chunked\r\nContent-Length: 6", &chunked_smuggle),
            "200 | POST /first",
            "400 | ",
            "as above",
        ),
        same_as_nginx(
            "TE.TE twice",
            post("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", &chunked_smuggle),
            "400 | ",
        ),
        unlike_nginx(
            "TE.TE list",
            post("Transfer-Encoding: identity, chunked", &chunked_smuggle),
            "400 | ",
            "501 | ",
            "both reject it, with different statuses",
        ),
        unlike_nginx(
            "TE unknown",
            post("Transfer-Encoding: xchunked", &chunked_smuggle),
            "400 | ",
            "501 | ",
            "both reject it, with different statuses",
        ),
        unlike_nginx(
            "TE with a tab",
            post("Transfer-Encoding:\tchunked", "0\r\n\r\n"),
            "200 200 | POST /first, GET /last",
            "501 | ",
            "a tab is white space; nginx 1.22 accepts only a space",
        ),
        unlike_nginx(
            "TE vertical tab",
            post("Transfer-Encoding: \u{b}chunked", &chunked_smuggle),
            "400 | ",
            "501 | ",
            "both reject it, with different statuses",
        ),
        same_as_nginx(
            "TE space before colon",
            post("Transfer-Encoding : chunked", &chunked_smuggle),
            "400 | ",
        ),
        unlike_nginx(
            "TE quoted",
            post("Transfer-Encoding: \"chunked\"", &chunked_smuggle),
            "400 | ",
            "501 | ",
            "both reject it, with different statuses",
        ),
        same_as_nginx(
            "TE in HTTP/1.0",
            format!(
                "POST /first HTTP/1.0\r\nHost: llm.test\r\nTransfer-Encoding: chunked\r\n\r\n{chunked_smuggle}"
            ),
            "400 | ",
        ),
        same_as_nginx(
            "CL twice, different",
            post("Content-Length: 0\r\nContent-Length: 84", SMUGGLED),
            "400 | ",
        ),
        unlike_nginx(
            "CL twice, same",
            post("Content-Length: 2\r\nContent-Length: 2", "hi"),
            "200 200 | POST /first +body, GET /last",
            "400 | ",
            "equal lengths are unambiguous and are forwarded as one",
        ),
        same_as_nginx("CL list", post("Content-Length: 2, 2", "hi"), "400 | "),
        same_as_nginx("CL signed", post("Content-Length: +2", "hi"), "400 | "),
        same_as_nginx("CL negative", post("Content-Length: -1", "hi"), "400 | "),
        same_as_nginx("CL hexadecimal", post("Content-Length: 0x2", "hi"), "400 | "),
        same_as_nginx("CL too large", post("Content-Length: 18446744073709551616", "hi"), "400 | "),
        same_as_nginx(
            "chunk size signed",
            post("Transfer-Encoding: chunked", "+2\r\nhi\r\n0\r\n\r\n"),
            "400 | ",
        ),
        same_as_nginx(
            "chunk size wraps",
            post("Transfer-Encoding: chunked", "10000000000000002\r\nhi\r\n0\r\n\r\n"),
            "400 | ",
        ),
        unlike_nginx(
            "chunk ends with LF",
            post("Transfer-Encoding: chunked", "2\nhi\n0\n\n"),
            "400 | ",
            "200 200 | POST /first +body, GET /last",
            "nginx reads a bare LF as the end of a line",
        ),
        same_as_nginx(
            "chunk longer than its size",
            post("Transfer-Encoding: chunked", "2\r\nhiX\r\n0\r\n\r\n"),
            "400 | ",
        ),
        same_as_nginx(
            "chunk extension",
            post("Transfer-Encoding: chunked", "2;a=b\r\nhi\r\n0\r\n\r\n"),
            "200 200 | POST /first +body, GET /last",
        ),
        same_as_nginx("two Hosts", get("Host: evil.test"), "400 | "),
        same_as_nginx("no Host", "GET /first HTTP/1.1\r\nX: y\r\n\r\n", "400 | "),
        unlike_nginx(
            "Host with a user",
            "GET /first HTTP/1.1\r\nHost: a@llm.test\r\n\r\n",
            "400 | ",
            "200 200 | GET /first @a@llm.test, GET /last",
            "nginx accepts any character in a host",
        ),
        same_as_nginx("Host with a path", "GET /first HTTP/1.1\r\nHost: llm.test/x\r\n\r\n", "400 | "),
        same_as_nginx("folded field", get("X: a\r\n b"), "400 | "),
        same_as_nginx(
            "folded first field",
            "GET /first HTTP/1.1\r\n Host: llm.test\r\nHost: llm.test\r\n\r\n",
            "400 | ",
        ),
        same_as_nginx(
            "absolute form",
            "GET http://llm.test/first HTTP/1.1\r\nHost: llm.test\r\n\r\n",
            "200 200 | GET /first, GET /last",
        ),
        unlike_nginx(
            "absolute form, other Host",
            "GET http://llm.test/first HTTP/1.1\r\nHost: evil.test\r\n\r\n",
            "400 | ",
            "200 200 | GET /first, GET /last",
            "nginx uses the target; the proxy rejects contradictory hosts",
        ),
        unlike_nginx(
            "authority form",
            "CONNECT llm.test:80 HTTP/1.1\r\nHost: llm.test\r\n\r\n",
            "405 | ",
            "400 | ",
            "both reject it, with different statuses",
        ),
        same_as_nginx("asterisk form", "OPTIONS * HTTP/1.1\r\nHost: llm.test\r\n\r\n", "400 | "),
        same_as_nginx("TRACE", "TRACE /first HTTP/1.1\r\nHost: llm.test\r\n\r\n", "405 | "),
        same_as_nginx(
            "CR LF in the path, encoded",
            "GET /first%0d%0aX:%20y HTTP/1.1\r\nHost: llm.test\r\n\r\n",
            "200 200 | GET /first%0d%0aX:%20y, GET /last",
        ),
        same_as_nginx("bare CR in the path", "GET /first\rX HTTP/1.1\r\nHost: llm.test\r\n\r\n", "400 | "),
        same_as_nginx("space in the path", "GET /fir st HTTP/1.1\r\nHost: llm.test\r\n\r\n", "400 | "),
        same_as_nginx("NUL in a field", get("X: a\0b"), "400 | "),
        same_as_nginx("bare CR in a field", get("X: a\rY: b"), "400 | "),
        same_as_nginx(
            "bare LF as line end",
            "GET /first HTTP/1.1\nHost: llm.test\n\n",
            "200 200 | GET /first, GET /last",
        ),
        unlike_nginx(
            "no colon",
            get("Nonsense"),
            "400 | ",
            "200 200 | GET /first, GET /last",
            "nginx drops lines that are not fields",
        ),
        same_as_nginx("empty name", get(": x"), "400 | "),
        unlike_nginx(
            "two spaces in the request line",
            "GET  /first HTTP/1.1\r\nHost: llm.test\r\n\r\n",
            "400 | ",
            "200 200 | GET /first, GET /last",
            "nginx is lenient",
        ),
        unlike_nginx("HTTP/0.9", "GET /first\r\n\r\n", "400 | ", " | GET /first", "nginx still supports it"),
        unlike_nginx(
            "HTTP/3.0",
            "GET /first HTTP/3.0\r\nHost: llm.test\r\n\r\n",
            "400 | ",
            "505 | ",
            "both reject it, with different statuses",
        ),
        same_as_nginx(
            "body on GET",
            format!(
                "GET /first HTTP/1.1\r\nHost: llm.test\r\nContent-Length: {}\r\n\r\n{SMUGGLED}",
                SMUGGLED.len()
            ),
            "200 200 | GET /first +body, GET /last",
        ),
        same_as_nginx(
            "GET with a chunked body",
            "GET /first HTTP/1.1\r\nHost: llm.test\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
            "200 200 | GET /first +body, GET /last",
        ),
        unlike_nginx(
            "h2c upgrade",
            get("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__"),
            "200 200 | GET /first, GET /last",
            "200 200 | GET /first http2-settings=AAMAAABkAAQAAP__, GET /last",
            "nginx forwards the settings",
        ),
        unlike_nginx(
            "upgrade that is not answered",
            get(&format!(
                "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 777\r\n\r\n{}",
                LAST.replace("/last", "/second").replace("Connection: close\r\n", "").trim_end()
            )),
            "200 200 200 | GET /first upgrade=websocket, GET /second, GET /last",
            "200 200 200 | GET /first, GET /second, GET /last",
            "nginx forwards upgrades only if configured",
        ),
        unlike_nginx(
            "upgrade with a body",
            post(
                &format!("Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: {}", SMUGGLED.len()),
                SMUGGLED,
            ),
            "400 | ",
            "200 200 | POST /first +body, GET /last",
            "nginx drops the upgrade and forwards the body",
        ),
        same_as_nginx(
            "Connection names Content-Length",
            post("Connection: Content-Length\r\nContent-Length: 2", "hi"),
            "200 200 | POST /first +body, GET /last",
        ),
        same_as_nginx(
            "Connection names Host",
            get("Connection: Host, X-Forwarded-For"),
            "200 200 | GET /first, GET /last",
        ),
    ]
}
