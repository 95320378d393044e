//! Generation of a struct, its reader, its printer and its schema from one table of fields, so that they cannot drift.
//!
//! ```text
//! table! {
//!     /// Description.
//!     pub struct Scaling {
//!         pub metric: Metric,                               // required
//!         pub window: Option<Seconds> = None,               // printed as null when absent
//!         pub nodes: Option<u32> = None => omit,            // left out when absent
//!         pub scale_up_delay: Seconds = Seconds(300),       // any default
//!     }
//!     flatten { pub profile: profile::Properties, }         // fields of others in the same mapping
//!     check = Self::check;                                  // rules between fields
//! }
//! ```

/// Defines a struct of named fields. See the head of the module.
macro_rules! table {
    (
        $(#[doc = $doc:literal])*
        pub struct $name:ident {
            $(
                $(#[doc = $fdoc:literal])*
                pub $field:ident $(as $key:literal)? : $ty:ty $(= $default:expr)? $(=> $omit:ident)?,
            )*
        }
        $(flatten { $( pub $flat:ident : $flat_ty:ty, )+ })?
        $(tag = $tag:literal;)?
        $(check = $check:path;)?
        $(title = $title:literal;)?
    ) => {
        $(#[doc = $doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $( $(#[doc = $fdoc])* pub $field: $ty, )*
            $( $( #[doc = "Shares the mapping."] pub $flat: $flat_ty, )+ )?
        }

        impl $crate::config::decode::Fields for $name {
            fn keys(keys: &mut Vec<&'static str>) {
                $( keys.push("type"); let _: &str = $tag; )?
                $( keys.push($crate::config::config_macros::key!($field $(as $key)?)); )*
                $( $( <$flat_ty as $crate::config::decode::Fields>::keys(keys); )+ )?
            }

            fn decode_fields(
                node: &$crate::config::yaml::Node,
                cx: &mut $crate::config::decode::Ctx,
            ) -> Option<Self> {
                $(
                    let $field: Option<$ty> =
                        $crate::config::config_macros::field!(node, cx, $crate::config::config_macros::key!($field $(as $key)?) $(, $default)?);
                )*
                $( $( let $flat = <$flat_ty as $crate::config::decode::Fields>::decode_fields(node, cx); )+ )?
                let decoded = Self { $( $field: $field?, )* $( $( $flat: $flat?, )+ )? };
                $( $check(&decoded, node, cx); )?
                Some(decoded)
            }

            fn write_fields<M: serde::ser::SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
                $( map.serialize_entry("type", $tag)?; )?
                $(
                    $crate::config::config_macros::entry!(
                        map, $crate::config::config_macros::key!($field $(as $key)?), self.$field $(, $omit)?
                    );
                )*
                $( $( self.$flat.write_fields(map)?; )+ )?
                Ok(())
            }

            fn properties(
                generator: &mut schemars::SchemaGenerator,
                into: &mut $crate::config::decode::SchemaProperties,
            ) {
                $(
                    into.properties.insert("type".to_owned(), serde_json::json!({ "const": $tag }));
                    into.required.push("type");
                )?
                $(
                    let mut schema = generator.subschema_for::<$ty>();
                    $crate::config::schema::describe(&mut schema, concat!("", $($fdoc, "\n",)*));
                    $crate::config::config_macros::default!(schema, $ty $(, $default)?);
                    into.properties.insert(
                        $crate::config::config_macros::key!($field $(as $key)?).to_owned(),
                        schema.to_value(),
                    );
                    $crate::config::config_macros::required!(into, $crate::config::config_macros::key!($field $(as $key)?) $(, $default)?);
                )*
                $( $( <$flat_ty as $crate::config::decode::Fields>::properties(generator, into); )+ )?
            }
        }

        impl $crate::config::decode::Decode for $name {
            fn decode(
                node: &$crate::config::yaml::Node,
                cx: &mut $crate::config::decode::Ctx,
            ) -> Option<Self> {
                $crate::config::decode::expect_map(node, cx)?;
                let mut keys = Vec::new();
                <Self as $crate::config::decode::Fields>::keys(&mut keys);
                $crate::config::decode::check_keys(node, &keys, cx);
                <Self as $crate::config::decode::Fields>::decode_fields(node, cx)
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                use serde::ser::SerializeMap as _;
                let mut map = serializer.serialize_map(None)?;
                $crate::config::decode::Fields::write_fields(self, &mut map)?;
                map.end()
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::config::decode::from_serde(deserializer)
            }
        }

        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $crate::config::config_macros::title!($name $(, $title)?).into()
            }
            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                $crate::config::schema::object::<Self>(generator, concat!("", $($doc, "\n",)*))
            }
        }
    };
}

/// Expands to the key of a field: its name, unless the table has `as "other"`.
macro_rules! key {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident as $key:literal) => {
        $key
    };
}

macro_rules! title {
    ($name:ident) => {
        stringify!($name)
    };
    ($name:ident, $title:literal) => {
        $title
    };
}

macro_rules! field {
    ($node:ident, $cx:ident, $key:expr) => {
        $crate::config::decode::required_field($node, $key, $cx)
    };
    ($node:ident, $cx:ident, $key:expr, $default:expr) => {
        $crate::config::decode::optional_field($node, $key, $cx, || $default)
    };
}

macro_rules! entry {
    ($map:ident, $key:expr, $value:expr) => {
        $map.serialize_entry($key, &$value)?
    };
    ($map:ident, $key:expr, $value:expr, omit) => {
        if let Some(value) = &$value {
            $map.serialize_entry($key, value)?
        }
    };
}

macro_rules! default {
    ($schema:ident, $ty:ty) => {};
    ($schema:ident, $ty:ty, $default:expr) => {
        let default: $ty = $default;
        $crate::config::schema::default(&mut $schema, &default);
    };
}

macro_rules! required {
    ($into:ident, $key:expr) => {
        $into.required.push($key)
    };
    ($into:ident, $key:expr, $default:expr) => {};
}

/// Defines a closed set of values. The first spelling of a variant is the one that is printed.
macro_rules! words {
    (
        $(#[doc = $doc:literal])*
        pub enum $name:ident {
            $( $(#[doc = $vdoc:literal])* $variant:ident = $word:literal $(| $alias:literal)*, )+
        }
    ) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name {
            $( $(#[doc = $vdoc])* $variant, )+
        }

        impl $name {
            pub const ALL: &'static [Self] = &[$( Self::$variant, )+];

            /// Returns the value as written in files and in the API.
            pub const fn as_str(self) -> &'static str {
                match self { $( Self::$variant => $word, )+ }
            }

            /// Parses a value.
            pub fn parse(word: &str) -> Option<Self> {
                match word {
                    $( $word $(| $alias)* => Some(Self::$variant), )+
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl $crate::config::decode::Decode for $name {
            fn decode(
                node: &$crate::config::yaml::Node,
                cx: &mut $crate::config::decode::Ctx,
            ) -> Option<Self> {
                let known = [$( $word, )+];
                $crate::config::decode::decode_word(node, cx, &known, Self::parse)
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::config::decode::from_serde(deserializer)
            }
        }

        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                let mut schema = schemars::json_schema!({ "type": "string", "enum": [$( $word $(, $alias)*, )+] });
                $crate::config::schema::describe(&mut schema, concat!("", $($doc, "\n",)*));
                schema
            }
        }
    };
}

/// Implements `Deserialize` for a type with a hand-written `Decode`.
macro_rules! deserialize_by_decoding {
    ($($name:ty),+ $(,)?) => {$(
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::config::decode::from_serde(deserializer)
            }
        }
    )+};
}

/// Implements `JsonSchema` for a type with a hand-written decoder, from literal JSON Schema.
macro_rules! schema_literal {
    ($($name:ty, $title:literal => $generator:ident $json:tt;)+) => {$(
        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $title.into()
            }
            fn json_schema($generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!($json)
            }
        }
    )+};
}

pub(crate) use {
    default, deserialize_by_decoding, entry, field, key, required, schema_literal, table, title, words,
};
