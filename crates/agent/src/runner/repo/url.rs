//! Check of clone URLs, and the parts that are passed to git. Pure.

/// URL that is safe for git's command line and configuration: it contains no secret and is not an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteUrl {
    pub(super) url: String,
    pub(super) scheme: Scheme,
    /// Host, with the port if one is given.
    pub(super) host: String,
    /// User and password before the host of an `https:` URL.
    pub(super) login: Option<(String, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    Https,
    Ssh,
    Git,
    /// Not encrypted: the token would be readable on the network.
    Http,
    /// A path, or a `file:` URL.
    Local,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error("the URL is empty, starts with `-` or contains spaces or control characters")]
    Malformed,
    #[error("`{scheme}` URLs are not supported")]
    Scheme { scheme: String },
    #[error("the URL has no host")]
    NoHost,
}

/// Parses a URL. `any` also accepts what only tests should use: `http:`, `file:` and paths.
pub(super) fn parse(url: &str, any: bool) -> Result<RemoteUrl, UrlError> {
    let odd = |c: char| c.is_control() || c.is_whitespace();
    if url.is_empty() || url.starts_with('-') || url.contains(odd) {
        return Err(UrlError::Malformed);
    }
    if let Some((scheme, rest)) = url.split_once("://") {
        return parse_with_scheme(&scheme.to_ascii_lowercase(), rest, any);
    }
    if let Some((helper, _)) = url.split_once("::") {
        return Err(UrlError::Scheme { scheme: helper.to_owned() });
    }
    match url.split_once(':') {
        Some((login, _)) if !login.contains('/') => {
            let host = login.rsplit_once('@').map_or(login, |(_, host)| host);
            Ok(RemoteUrl { url: url.to_owned(), scheme: Scheme::Ssh, host: check_host(host)?, login: None })
        }
        _ => local_url(url, any),
    }
}

fn parse_with_scheme(scheme: &str, rest: &str, any: bool) -> Result<RemoteUrl, UrlError> {
    let kind = match scheme {
        "https" => Scheme::Https,
        "ssh" => Scheme::Ssh,
        "git" => Scheme::Git,
        "http" if any => Scheme::Http,
        "file" => return local_url(&format!("file://{rest}"), any),
        other => return Err(UrlError::Scheme { scheme: other.to_owned() }),
    };
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (login, host) = match authority.rsplit_once('@') {
        Some((login, host)) => (Some(login), check_host(host)?),
        None => (None, check_host(authority)?),
    };
    let (user, password) = match login {
        Some(login) => login.split_once(':').unwrap_or((login, "")),
        None => ("", ""),
    };
    let keep_user = kind == Scheme::Ssh && !user.is_empty();
    let before = if keep_user { format!("{user}@") } else { String::new() };
    let login = (matches!(kind, Scheme::Https | Scheme::Http) && !(user.is_empty() && password.is_empty()))
        .then(|| (percent_decode(user), percent_decode(password)));
    Ok(RemoteUrl { url: format!("{scheme}://{before}{host}/{path}"), scheme: kind, host, login })
}

fn local_url(url: &str, any: bool) -> Result<RemoteUrl, UrlError> {
    if !any {
        return Err(UrlError::Scheme { scheme: "file".to_owned() });
    }
    Ok(RemoteUrl { url: url.to_owned(), scheme: Scheme::Local, host: String::new(), login: None })
}

fn check_host(host: &str) -> Result<String, UrlError> {
    if host.is_empty() || host.starts_with([':', '-']) { Err(UrlError::NoHost) } else { Ok(host.to_owned()) }
}

/// Decodes `%XX`.
fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let hex = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match (first, hex.and_then(|hex| u8::from_str_radix(hex, 16).ok())) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(url: &str, expected: &str) {
        let message = match parse(url, false) {
            Ok(remote) => {
                let login =
                    remote.login.map(|(user, password)| format!(" {user}|{password}")).unwrap_or_default();
                format!("{:?} {} at {}{login}", remote.scheme, remote.url, remote.host)
            }
            Err(error) => error.to_string(),
        };
        assert_eq!(message, expected, "{url}");
    }

    #[test]
    fn repository_urls_are_parsed_and_their_secrets_removed() {
        check("https://github.com/o/r.git", "Https https://github.com/o/r.git at github.com");
        check("HTTPS://h:8443/r", "Https https://h:8443/r at h:8443");
        check("https://me:s%40cret@h/r", "Https https://h/r at h me|s@cret");
        check("https://tok@h/r", "Https https://h/r at h tok|");
        check("ssh://git@h:22/o/r", "Ssh ssh://git@h:22/o/r at h:22");
        check("ssh://git:pw@h/o/r", "Ssh ssh://git@h/o/r at h");
        check("git@github.com:o/r.git", "Ssh git@github.com:o/r.git at github.com");
        check("git://h/r", "Git git://h/r at h");
    }

    #[test]
    fn urls_that_would_run_a_program_or_read_local_files_are_refused() {
        const MALFORMED: &str = "the URL is empty, starts with `-` or contains spaces or control characters";
        check("", MALFORMED);
        check("--upload-pack=touch /tmp/x", MALFORMED);
        check("https://h/r\nx", MALFORMED);
        check("ext::sh -c x", MALFORMED);
        check("ext::sh", "`ext` URLs are not supported");
        check("fd::17", "`fd` URLs are not supported");
        check("file:///etc", "`file` URLs are not supported");
        check("/etc", "`file` URLs are not supported");
        check("./x:y", "`file` URLs are not supported");
        check("http://h/r", "`http` URLs are not supported");
        check("ftp://h/r", "`ftp` URLs are not supported");
        check("ssh://-oProxyCommand=x/r", "the URL has no host");
        check("git@-oProxyCommand=x:r", "the URL has no host");
        check("https:///r", "the URL has no host");
    }

    const WORDS: &[&str] = &[
        "https",
        "ssh",
        "git",
        "file",
        "ext",
        "://",
        "::",
        ":",
        "@",
        "/",
        "-",
        "--upload-pack=x",
        "..",
        "host",
        "[::1]",
        "user",
        "token",
        "%40",
        "%2f",
        "%0a",
        " ",
        "\n",
        "\0",
        "é",
        "?",
        "#",
        "8080",
        "HTTPS",
    ];

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: windlass_testkit::fuzz_cases(),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn fuzz_of_git_urls(
            words in prop::collection::vec(prop::sample::select(WORDS), 0..12),
            noise in "(?s).{0,60}",
        ) {
            for url in [words.concat(), noise] {
                for any in [false, true] {
                    let Ok(remote) = parse(&url, any) else { continue };
                    prop_assert!(!remote.url.starts_with('-'), "{remote:?} is an option");
                    prop_assert!(!remote.url.contains(char::is_control), "{remote:?}");
                    let kept = any || matches!(remote.scheme, Scheme::Https | Scheme::Ssh | Scheme::Git);
                    prop_assert!(kept && (remote.scheme == Scheme::Local || !remote.host.is_empty()), "{remote:?}");
                    // Secrets are not passed on a command line.
                    if remote.scheme == Scheme::Https {
                        let authority = remote.url.split('/').nth(2).unwrap_or_default();
                        prop_assert!(!authority.contains('@'), "{remote:?}");
                    }
                }
            }
        }
    }
}
