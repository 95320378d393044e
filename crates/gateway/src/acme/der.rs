//! The one ASN.1 document we write: a request for a certificate (PKCS #10).

use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _},
};

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const BITS: u8 = 0x03;
const OCTETS: u8 = 0x04;
const ATTRIBUTES: u8 = 0xa0;
const DNS_NAME: u8 = 0x82;

const ZERO: &[u8] = &[0x02, 1, 0];
const EC_PUBLIC_KEY: &[u8] = &[0x06, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1];
const PRIME256V1: &[u8] = &[0x06, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7];
const ECDSA_WITH_SHA256: &[u8] = &[0x06, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
const EXTENSION_REQUEST: &[u8] = &[0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 0x0e];
const SUBJECT_ALT_NAME: &[u8] = &[0x06, 3, 0x55, 0x1d, 0x11];

/// A tag, the length, and the parts.
fn tagged(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let mut out = vec![tag];
    if length < 128 {
        out.push(length as u8);
    } else {
        let bytes: Vec<u8> = length.to_be_bytes().into_iter().skip_while(|byte| *byte == 0).collect();
        out.push(0x80 | bytes.len() as u8);
        out.extend(bytes);
    }
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out
}

fn bits(bytes: &[u8]) -> Vec<u8> {
    tagged(BITS, &[&[0], bytes])
}

/// A new key for a certificate, as PKCS #8.
pub(super) fn new_key() -> Result<Vec<u8>, ring::error::Unspecified> {
    Ok(EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new())?.as_ref().to_vec())
}

/// Asks for a certificate for these names, signed with the key that it will have.
pub(super) fn request(key: &[u8], names: &[String]) -> Result<Vec<u8>, ring::error::Unspecified> {
    let random = SystemRandom::new();
    let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, key, &random)
        .map_err(|_| ring::error::Unspecified)?;
    let algorithm = tagged(SEQUENCE, &[EC_PUBLIC_KEY, PRIME256V1]);
    let public = tagged(SEQUENCE, &[&algorithm, &bits(pair.public_key().as_ref())]);
    let names: Vec<u8> = names.iter().flat_map(|name| tagged(DNS_NAME, &[name.as_bytes()])).collect();
    let names = tagged(OCTETS, &[&tagged(SEQUENCE, &[&names])]);
    let extension = tagged(SEQUENCE, &[SUBJECT_ALT_NAME, &names]);
    let extensions = tagged(SET, &[&tagged(SEQUENCE, &[&extension])]);
    let attribute = tagged(SEQUENCE, &[EXTENSION_REQUEST, &extensions]);
    let subject = tagged(SEQUENCE, &[]);
    let info = tagged(SEQUENCE, &[ZERO, &subject, &public, &tagged(ATTRIBUTES, &[&attribute])]);
    let signature = pair.sign(&random, &info)?;
    let how = tagged(SEQUENCE, &[ECDSA_WITH_SHA256]);
    Ok(tagged(SEQUENCE, &[&info, &how, &bits(signature.as_ref())]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_written_short_and_long() {
        assert_eq!(tagged(4, &[b"ab"]), [4, 2, b'a', b'b']);
        assert_eq!(tagged(4, &[&[0; 200]])[..3], [4, 0x81, 200]);
        assert_eq!(tagged(4, &[&[0; 300]])[..4], [4, 0x82, 1, 44]);
    }
}
