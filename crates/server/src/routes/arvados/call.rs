//! A call as clients of Arvados send it: parameters in the query or, where that would be too long, in a form; records
//! as JSON or as a form field.

use std::{collections::BTreeMap, net::IpAddr};

use axum::{
    body::Bytes,
    extract::Request,
    http::{HeaderMap, header},
};
use serde_json::{Map, Value};

use crate::{
    app::App,
    db::queue_list::{Condition, ListQuery},
    peer::Peer,
    services::queue::{Error, Requester, Result, auth},
};

/// Default and maximum number of items of a page.
const LIMIT: i64 = 100;
const LIMIT_MAX: i64 = 1000;
const FILTERS_MAX: usize = 1000;

pub(super) struct ApiCall {
    pub(super) method: String,
    /// Path below `/arvados/v1/`.
    pub(super) path: String,
    params: BTreeMap<String, String>,
    json: Map<String, Value>,
    pub(super) raw: Bytes,
}

/// Client's id of the request, if it is safe to repeat.
pub(super) fn request_id(request: &Request) -> Option<String> {
    let id = request.headers().get("x-request-id")?.to_str().ok()?;
    let is_plain = (1..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    is_plain.then(|| id.to_owned())
}

/// Token, in the new or the old form.
pub(super) fn token(request: &Request) -> Option<String> {
    let header = request.headers().get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = header.split_once(' ')?;
    let known = scheme.eq_ignore_ascii_case("bearer") || scheme.eq_ignore_ascii_case("oauth2");
    (known && !token.trim().is_empty()).then(|| token.trim().to_owned())
}

/// Identification of the sender of a request.
pub(super) struct RequestSender {
    peer: Option<IpAddr>,
    token: String,
    /// Client's name of the call; empty if it has none.
    named: String,
}

impl RequestSender {
    pub(super) fn from_request(request: &Request, token: String) -> Self {
        let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
        Self { peer, token, named: request_id(request).unwrap_or_default() }
    }

    /// Authenticates the caller, unless its address has too many failures. Every wrong token counts, whatever its form;
    /// the owner of a generated token is admitted regardless of other attempts from the same address.
    pub(super) async fn authenticate(&self, app: &App) -> Result<Requester> {
        if let Some(peer) = self.peer
            && !auth::is_generated(app, &self.token)
        {
            app.paces().check_login(peer)?;
        }
        let asker = auth::authenticate(app, &self.token, &self.named).await;
        if let (Err(Error::Unauthenticated), Some(peer)) = (&asker, self.peer) {
            app.paces().tried(peer)?;
        }
        asker
    }
}

/// Decodes `a=1&b=%20+`.
pub(super) fn pairs(text: &str) -> Vec<(String, String)> {
    let pieces = text.split('&').filter(|piece| !piece.is_empty());
    pieces
        .map(|piece| {
            let (name, value) = piece.split_once('=').unwrap_or((piece, ""));
            (decode(name), decode(value))
        })
        .collect()
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let pair: Vec<u8> = rest.clone().take(2).collect();
                let code = std::str::from_utf8(&pair).ok().and_then(|pair| u8::from_str_radix(pair, 16).ok());
                match code {
                    Some(code) if pair.len() == 2 => {
                        bytes.push(code);
                        rest.next();
                        rest.next();
                    }
                    _ => bytes.push(b'%'),
                }
            }
            byte => bytes.push(byte),
        }
    }
    // Stored text contains no NUL, and Postgres rejects it.
    String::from_utf8_lossy(&bytes).replace('\0', "")
}

fn has_content_type(headers: &HeaderMap, kind: &str) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    value.is_some_and(|value| value.starts_with(kind))
}

impl ApiCall {
    pub(super) async fn read(app: &App, request: Request) -> Result<Self> {
        let (head, body) = request.into_parts();
        let settings = app.settings();
        let raw = crate::http::collect(body, settings.limits.request_bytes, settings.body_timeout).await?;
        let mut params: BTreeMap<String, String> =
            pairs(head.uri.query().unwrap_or_default()).into_iter().collect();
        let mut json = Map::new();
        if has_content_type(&head.headers, "application/x-www-form-urlencoded") {
            params.extend(pairs(&String::from_utf8_lossy(&raw)));
        } else if has_content_type(&head.headers, "application/json") && !raw.is_empty() {
            if crate::http::has_nul(&raw) {
                return Err(Error::invalid("text must not contain NUL"));
            }
            let parsed: Value = serde_json::from_slice(&raw)
                .map_err(|error| Error::invalid(format!("invalid request body: {error}")))?;
            json = parsed.as_object().cloned().unwrap_or_default();
        }
        if params.values().any(|value| crate::http::has_nul(value.as_bytes())) {
            return Err(Error::invalid("text must not contain NUL"));
        }
        let over = head.headers.get("x-http-method-override").and_then(|value| value.to_str().ok());
        let over = over.map(str::to_owned).or_else(|| params.get("_method").cloned());
        let method = match over {
            // Only a POST may stand for another method.
            Some(over) if head.method == "POST" => over.to_ascii_uppercase(),
            Some(_) | None => head.method.to_string(),
        };
        let path = head.uri.path().strip_prefix("/arvados/v1/").unwrap_or_default();
        Ok(Self { method, path: path.trim_end_matches('/').to_owned(), params, json, raw })
    }

    pub(super) fn is_write(&self) -> bool {
        !matches!(self.method.as_str(), "GET" | "HEAD" | "OPTIONS")
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.params.get(name).map(String::as_str)
    }

    /// Value of a parameter, which JSON bodies may contain too.
    fn value(&self, name: &str) -> Result<Option<Value>> {
        let Some(text) = self.text(name) else { return Ok(self.json.get(name).cloned()) };
        if text.is_empty() {
            return Ok(None);
        }
        let is_json = text.starts_with(['[', '{', '"']);
        if !is_json {
            return Ok(Some(Value::String(text.to_owned())));
        }
        let parsed = serde_json::from_str(text);
        parsed.map(Some).map_err(|error| Error::invalid(format!("invalid `{name}`: {error}")))
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<i64>> {
        let wrong = || Error::invalid(format!("`{name}` must be an integer"));
        match self.value(name)? {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Number(number)) => number.as_i64().map(Some).ok_or_else(wrong),
            Some(Value::String(text)) => text.parse().map(Some).map_err(|_| wrong()),
            Some(Value::Bool(_) | Value::Array(_) | Value::Object(_)) => Err(wrong()),
        }
    }

    pub(super) fn words(&self, name: &str) -> Result<Option<Vec<String>>> {
        match self.value(name)? {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => {
                Ok(Some(text.split(',').map(|word| word.trim().to_owned()).collect()))
            }
            Some(list) => serde_json::from_value(list)
                .map(Some)
                .map_err(|_| Error::invalid(format!("`{name}` must be a list of strings"))),
        }
    }

    /// The record that was sent.
    pub(super) fn attributes(&self, name: &str) -> Result<Map<String, Value>> {
        let sent = match self.json.get(name) {
            Some(record) => Some(record.clone()),
            None => self.value(name)?,
        };
        match sent {
            Some(Value::Object(record)) => Ok(record),
            Some(Value::String(text)) => serde_json::from_str(&text)
                .map_err(|error| Error::invalid(format!("invalid `{name}`: {error}"))),
            None => Ok(Map::new()),
            Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_)) => {
                Err(Error::invalid(format!("`{name}` must be an object")))
            }
        }
    }

    pub(super) fn requested(&self) -> Result<ListQuery> {
        let limit = self.number("limit")?.unwrap_or(LIMIT);
        if limit < 0 {
            return Err(Error::invalid("`limit` must not be negative"));
        }
        Ok(ListQuery {
            conditions: filters(self.value("filters")?.as_ref())?,
            order: order(self.words("order")?.unwrap_or_default()),
            limit: limit.min(LIMIT_MAX),
            offset: self.number("offset")?.unwrap_or(0).max(0),
            count: self.text("count") != Some("none"),
        })
    }
}

/// Parses `[[attribute, operator, operand], …]`.
pub(super) fn filters(value: Option<&Value>) -> Result<Vec<Condition>> {
    let wrong = |what: &Value| Error::invalid(format!("invalid filter: {what}"));
    let list = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(other @ (Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_))) => {
            return Err(wrong(other));
        }
    };
    if list.len() > FILTERS_MAX {
        return Err(Error::invalid(format!("too many filters: the maximum is {FILTERS_MAX}")));
    }
    let parsed = list.iter().map(|filter| {
        let parts = filter.as_array().filter(|parts| parts.len() == 3).ok_or_else(|| wrong(filter))?;
        let word = |at: usize| parts[at].as_str().map(str::to_owned).ok_or_else(|| wrong(filter));
        Ok(Condition { attribute: word(0)?, op: word(1)?.to_ascii_lowercase(), operand: parts[2].clone() })
    });
    parsed.collect()
}

/// Parses items such as `created_at asc`.
fn order(words: Vec<String>) -> Vec<(String, bool)> {
    let parts = words.iter().flat_map(|word| word.split(','));
    parts
        .map(str::trim)
        .filter(|word| !word.is_empty())
        .map(|word| {
            let (name, direction) = word.split_once(' ').unwrap_or((word, ""));
            let name = name.rsplit('.').next().unwrap_or(name);
            (name.to_owned(), direction.trim().eq_ignore_ascii_case("desc"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{filters, order, pairs};

    #[test]
    fn form_parameters_are_decoded_and_malformed_escapes_are_kept() {
        let read = pairs("filters=%5B%5B%22a%22%5D%5D&x=1+2%2B3&empty&odd=%zz%4");
        let want = [("filters", r#"[["a"]]"#), ("x", "1 2+3"), ("empty", ""), ("odd", "%zz%4")];
        assert_eq!(read, want.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }

    #[test]
    fn invalid_filters_are_refused() {
        assert_eq!(filters(Some(&json!([["state", "IN", ["Queued"]]]))).unwrap()[0].op, "in");
        for odd in [json!("state"), json!([["state", "="]]), json!([[1, "=", 2]]), json!({})] {
            assert!(filters(Some(&odd)).is_err(), "{odd}");
        }
    }

    #[test]
    fn order_accepts_comma_separated_and_list_forms() {
        let want = vec![("id".to_owned(), true), ("uuid".to_owned(), false)];
        assert_eq!(order(vec!["id desc, uuid".into()]), want);
        assert_eq!(order(vec!["logs.id DESC".into(), "uuid asc".into()]), want);
    }
}
