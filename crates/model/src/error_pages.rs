//! Pages about error codes: those of `docs/errors`, compiled into the programs.

/// The page of an error code.
#[derive(Debug, serde::Serialize)]
pub struct ErrorPage {
    pub code: &'static str,
    /// Markdown.
    pub text: &'static str,
}

macro_rules! pages {
    ($($code:literal)*) => {
        [$(ErrorPage { code: $code, text: include_str!(concat!("../../../docs/errors/", $code, ".md")) }),*]
    };
}

/// By code.
pub static ERROR_PAGES: [ErrorPage; 32] = pages!(
    "C001" "C002" "C003" "C004" "C010" "C011" "C012" "C013" "C014" "C015" "C016" "C017" "C018"
    "W001" "W002" "W003" "W010" "W011" "W012" "W013" "W014" "W015" "W016" "W017" "W018"
    "W020" "W021" "W030" "W031" "W032" "W033" "W034"
);

impl ErrorPage {
    /// Finds the page of a code, whatever its letter case.
    pub fn find(code: &str) -> Option<&'static Self> {
        ERROR_PAGES.iter().find(|page| page.code.eq_ignore_ascii_case(code.trim()))
    }

    /// `unreachable`, from the heading `# W010: unreachable`.
    pub fn name(&self) -> &'static str {
        let heading = self.text.lines().next().unwrap_or_default();
        heading.split_once(": ").map_or("", |(_, name)| name)
    }

    /// First sentence under the first heading.
    pub fn summary(&self) -> String {
        let body = self.text.split_once("## What happened\n\n").map_or("", |(_, body)| body);
        let paragraph = body.split("\n\n").next().unwrap_or_default().replace('\n', " ");
        let end = paragraph.find(". ").map_or(paragraph.len(), |at| at + 1);
        paragraph[..end].to_owned()
    }
}
