//! Answers of the query protocol: small XML documents without attributes of interest.

/// Nesting that no answer of AWS has.
const DEPTH_MAX: usize = 40;

#[derive(Debug, thiserror::Error)]
pub(crate) enum XmlError {
    #[error("invalid XML")]
    Syntax(#[from] roxmltree::Error),
    #[error("the XML is nested more than {DEPTH_MAX} levels deep")]
    Depth,
}

/// Element with its text and its children. Names have no namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Element {
    name: String,
    text: String,
    children: Vec<Self>,
}

impl Element {
    /// Parses a document and returns its root. Entities of a document type are not expanded: they are refused.
    pub(crate) fn parse(text: &str) -> Result<Self, XmlError> {
        let document = roxmltree::Document::parse(text)?;
        Self::from_node(document.root_element(), DEPTH_MAX)
    }

    fn from_node(node: roxmltree::Node<'_, '_>, depth: usize) -> Result<Self, XmlError> {
        let depth = depth.checked_sub(1).ok_or(XmlError::Depth)?;
        let elements = node.children().filter(roxmltree::Node::is_element);
        Ok(Self {
            name: node.tag_name().name().to_owned(),
            text: node.text().unwrap_or_default().trim().to_owned(),
            children: elements.map(|child| Self::from_node(child, depth)).collect::<Result<_, _>>()?,
        })
    }

    /// Finds the first element at a path like `a/b`.
    pub(crate) fn at(&self, path: &str) -> Option<&Self> {
        path.split('/')
            .try_fold(self, |element, name| element.children.iter().find(|child| child.name == name))
    }

    /// Text of the element at a path; `None` if it is absent or empty.
    pub(crate) fn text(&self, path: &str) -> Option<&str> {
        self.at(path).map(|element| element.text.as_str()).filter(|text| !text.is_empty())
    }

    /// Number at a path.
    pub(crate) fn number<T: std::str::FromStr>(&self, path: &str) -> Option<T> {
        self.text(path)?.parse().ok()
    }

    pub(crate) fn is_true(&self, path: &str) -> bool {
        self.text(path) == Some("true")
    }

    /// Entries of the list at a path.
    pub(crate) fn items(&self, path: &str) -> impl Iterator<Item = &Self> {
        let list = self.at(path).into_iter().flat_map(|list| &list.children);
        list.filter(|child| child.name == "item")
    }

    /// Texts of the entries of the list at a path.
    pub(crate) fn texts(&self, path: &str) -> impl Iterator<Item = &str> {
        self.items(path).map(|item| item.text.as_str())
    }

    /// Value of a tag in `tagSet`.
    pub(crate) fn tag(&self, key: &str) -> Option<&str> {
        self.items("tagSet").find(|tag| tag.text("key") == Some(key))?.text("value")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn elements_lists_and_tags_are_found_by_path() {
        let text = r#"<?xml version="1.0" encoding="UTF-8"?>
            <R xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><set><item><id>i-1</id><n>3</n>
            <tagSet><item><key>Name</key><value>a &amp; b</value></item></tagSet></item><item><id/></item></set></R>"#;
        let root = Element::parse(text).unwrap();
        let items: Vec<_> = root.items("set").collect();
        assert_eq!(items.len(), 2);
        assert_eq!((items[0].text("id"), items[0].number::<u32>("n")), (Some("i-1"), Some(3)));
        assert_eq!((items[0].tag("Name"), items[0].tag("other")), (Some("a & b"), None));
        assert_eq!((items[1].text("id"), root.text("none/x")), (None, None));
    }

    #[test]
    fn documents_with_entities_and_deep_ones_are_refused() {
        let bomb = r#"<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><x>&b;</x>"#;
        assert!(matches!(Element::parse(bomb), Err(XmlError::Syntax(_))));
        let deep = format!("{}{}", "<a>".repeat(DEPTH_MAX + 1), "</a>".repeat(DEPTH_MAX + 1));
        assert!(matches!(Element::parse(&deep), Err(XmlError::Depth)));
    }

    #[test]
    fn a_document_of_a_megabyte_of_nested_elements_is_refused() {
        let levels = 1 << 17;
        for text in ["<a>".repeat(levels), format!("{}{}", "<a>".repeat(levels), "</a>".repeat(levels))] {
            assert!(Element::parse(&text).is_err());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: windlass_testkit::fuzz_cases(),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn fuzz_of_answers_of_aws(
            words in prop::collection::vec(
                prop::sample::select(
                    &["<a>", "</a>", "<item>", "</item>", "<key>", "</key>", "<tagSet>", "</tagSet>", "<!DOCTYPE x [", "]>",
                      "<!ENTITY a \"b\">", "&a;", "&#0;", "<![CDATA[", "]]>", "<?xml ?>", "x", "<", ">", "\"", " y='"][..],
                ),
                0..30,
            ),
            noise in "(?s).{0,100}",
        ) {
            for text in [words.concat(), noise] {
                if let Ok(root) = Element::parse(&text) {
                    let _ = (root.tag("x"), root.text("a/item"), root.items("tagSet").count());
                }
            }
        }
    }
}
