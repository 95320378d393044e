//! Parser for the `WWW-Authenticate` response header.

/// An authentication challenge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Challenge {
    /// User name and password with each call.
    Basic,
    /// A bearer token from the token endpoint `realm`.
    Bearer { realm: String, service: Option<String>, scope: Option<String> },
}

impl Challenge {
    /// Parses a header value. Returns `None` for unsupported schemes.
    pub(crate) fn parse(header: &str) -> Option<Self> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let parameters = parameters(rest);
        let value = |name: &str| {
            parameters.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.clone())
        };
        Some(Self::Bearer { realm: value("realm")?, service: value("service"), scope: value("scope") })
    }
}

/// Parses comma-separated `name="value"` and `name=value` parameters.
fn parameters(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut rest = text.trim_start_matches([' ', ',']);
    while let Some((name, after)) = rest.split_once('=') {
        let (value, after) = match after.strip_prefix('"') {
            Some(quoted) => quoted_value(quoted),
            None => {
                let end = after.find(',').unwrap_or(after.len());
                (after[..end].trim().to_owned(), &after[end..])
            }
        };
        found.push((name.trim().to_owned(), value));
        rest = after.trim_start_matches([' ', ',']);
    }
    found
}

/// Reads up to the closing quote; returns the value and the rest.
fn quoted_value(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.extend(letters.next().map(|(_, letter)| letter)),
            _ => value.push(letter),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authentication_challenges_are_parsed() {
        let bearer = |realm: &str, service: Option<&str>, scope: Option<&str>| Challenge::Bearer {
            realm: realm.to_owned(),
            service: service.map(str::to_owned),
            scope: scope.map(str::to_owned),
        };
        let table = [
            ("Basic realm=\"x\"", Some(Challenge::Basic)),
            ("basic", Some(Challenge::Basic)),
            (
                "Bearer realm=\"https://auth.test/token\",service=\"registry.test\",scope=\"repository:a/b:pull,push\"",
                Some(bearer(
                    "https://auth.test/token",
                    Some("registry.test"),
                    Some("repository:a/b:pull,push"),
                )),
            ),
            (
                "Bearer service=x, realm=https://auth.test/t",
                Some(bearer("https://auth.test/t", Some("x"), None)),
            ),
            ("Bearer realm=\"a\\\"b\"", Some(bearer("a\"b", None, None))),
            ("Bearer realm=\"never closed", Some(bearer("never closed", None, None))),
            ("Bearer service=\"x\"", None),
            ("Negotiate", None),
            ("", None),
        ];
        for (header, expected) in table {
            assert_eq!(Challenge::parse(header), expected, "{header}");
        }
    }
}
