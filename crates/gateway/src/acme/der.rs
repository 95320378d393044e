//! ASN.1 encoding of certificate requests (PKCS #10) and self-signed certificates (X.509).

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
const IP_ADDRESS: u8 = 0x87;
const VERSION: u8 = 0xa0;
const EXTENSIONS: u8 = 0xa3;
const INTEGER: u8 = 0x02;
const UTF8: u8 = 0x0c;
const TIME: u8 = 0x18;

const ZERO: &[u8] = &[0x02, 1, 0];
const EC_PUBLIC_KEY: &[u8] = &[0x06, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1];
const PRIME256V1: &[u8] = &[0x06, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7];
const ECDSA_WITH_SHA256: &[u8] = &[0x06, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
const EXTENSION_REQUEST: &[u8] = &[0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 0x0e];
const SUBJECT_ALT_NAME: &[u8] = &[0x06, 3, 0x55, 0x1d, 0x11];
const COMMON_NAME: &[u8] = &[0x06, 3, 0x55, 4, 3];

/// Encodes a tag, the length and the parts.
fn encode_element(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
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

fn bit_string(bytes: &[u8]) -> Vec<u8> {
    encode_element(BITS, &[&[0], bytes])
}

/// Generates a key for a certificate, as PKCS #8.
pub(super) fn new_key() -> Result<Vec<u8>, ring::error::Unspecified> {
    Ok(EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new())?.as_ref().to_vec())
}

/// Encodes a certificate request for these names, signed with the key of the certificate.
pub(super) fn certificate_request(key: &[u8], names: &[String]) -> Result<Vec<u8>, ring::error::Unspecified> {
    let random = SystemRandom::new();
    let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, key, &random)
        .map_err(|_| ring::error::Unspecified)?;
    let algorithm = encode_element(SEQUENCE, &[EC_PUBLIC_KEY, PRIME256V1]);
    let public = encode_element(SEQUENCE, &[&algorithm, &bit_string(pair.public_key().as_ref())]);
    let names: Vec<u8> = names.iter().flat_map(|name| encode_element(DNS_NAME, &[name.as_bytes()])).collect();
    let names = encode_element(OCTETS, &[&encode_element(SEQUENCE, &[&names])]);
    let extension = encode_element(SEQUENCE, &[SUBJECT_ALT_NAME, &names]);
    let extensions = encode_element(SET, &[&encode_element(SEQUENCE, &[&extension])]);
    let attribute = encode_element(SEQUENCE, &[EXTENSION_REQUEST, &extensions]);
    let subject = encode_element(SEQUENCE, &[]);
    let info =
        encode_element(SEQUENCE, &[ZERO, &subject, &public, &encode_element(ATTRIBUTES, &[&attribute])]);
    let signature = pair.sign(&random, &info)?;
    let how = encode_element(SEQUENCE, &[ECDSA_WITH_SHA256]);
    Ok(encode_element(SEQUENCE, &[&info, &how, &bit_string(signature.as_ref())]))
}

/// Creates a self-signed certificate for these names and addresses, with its key. Clients trust this exact certificate,
/// so it does not expire.
pub fn self_signed(names: &[String]) -> Result<(Vec<u8>, Vec<u8>), ring::error::Unspecified> {
    let random = SystemRandom::new();
    let key = new_key()?;
    let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &key, &random)
        .map_err(|_| ring::error::Unspecified)?;
    let mut serial = [0_u8; 16];
    ring::rand::SecureRandom::fill(&random, &mut serial)?;
    // Positive, and in the shortest encoding.
    serial[0] = serial[0] & 0x3f | 0x40;
    let alternatives: Vec<u8> = names
        .iter()
        .flat_map(|name| match name.parse() {
            Ok(std::net::IpAddr::V4(address)) => encode_element(IP_ADDRESS, &[&address.octets()]),
            Ok(std::net::IpAddr::V6(address)) => encode_element(IP_ADDRESS, &[&address.octets()]),
            Err(_) => encode_element(DNS_NAME, &[name.as_bytes()]),
        })
        .collect();
    let alternatives = encode_element(OCTETS, &[&encode_element(SEQUENCE, &[&alternatives])]);
    let extension = encode_element(SEQUENCE, &[SUBJECT_ALT_NAME, &alternatives]);
    let extensions = encode_element(EXTENSIONS, &[&encode_element(SEQUENCE, &[&extension])]);
    let called = encode_element(SEQUENCE, &[COMMON_NAME, &encode_element(UTF8, &[b"windlass"])]);
    let subject = encode_element(SEQUENCE, &[&encode_element(SET, &[&called])]);
    let life = encode_element(
        SEQUENCE,
        &[&encode_element(TIME, &[b"20240101000000Z"]), &encode_element(TIME, &[b"99991231235959Z"])],
    );
    let algorithm = encode_element(SEQUENCE, &[EC_PUBLIC_KEY, PRIME256V1]);
    let public = encode_element(SEQUENCE, &[&algorithm, &bit_string(pair.public_key().as_ref())]);
    let version = encode_element(VERSION, &[&[INTEGER, 1, 2]]);
    let how = encode_element(SEQUENCE, &[ECDSA_WITH_SHA256]);
    let serial = encode_element(INTEGER, &[&serial]);
    let parts: [&[u8]; 8] = [&version, &serial, &how, &subject, &life, &subject, &public, &extensions];
    let info = encode_element(SEQUENCE, &parts);
    let signature = pair.sign(&random, &info)?;
    Ok((encode_element(SEQUENCE, &[&info, &how, &bit_string(signature.as_ref())]), key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn der_lengths_use_the_short_and_the_long_form() {
        assert_eq!(encode_element(4, &[b"ab"]), [4, 2, b'a', b'b']);
        assert_eq!(encode_element(4, &[&[0; 200]])[..3], [4, 0x81, 200]);
        assert_eq!(encode_element(4, &[&[0; 300]])[..4], [4, 0x82, 1, 44]);
    }
}
