//! What a device is called.

use ebb_units::DeviceUuid;

/// The model name of every simulated device.
#[must_use]
pub const fn device_name() -> &'static str {
    "ebb simulated GPU"
}

/// The UUID of the device with this physical index: always the same, and different in the first digits, so that a prefix
/// of the text names one device.
#[must_use]
pub fn device_uuid(index: u32) -> DeviceUuid {
    let mut bytes = [0u8; 16];
    let mut state = 0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(u64::from(index) + 1);
    for byte in &mut bytes {
        state ^= state >> 30;
        state = state.wrapping_mul(0xBF58_476D_1CE4_E5B9);
        state ^= state >> 27;
        *byte = state.to_le_bytes()[3];
    }
    // The first byte counts, so that no two prefixes are alike.
    bytes[0] = 0x5e_u8.wrapping_add((index as u8).wrapping_mul(0x11));
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    DeviceUuid(bytes)
}

/// The UUID of a card that is cut into devices, which have UUIDs of their own.
#[must_use]
pub fn card_uuid(card: u32) -> DeviceUuid {
    let DeviceUuid(mut bytes) = device_uuid(card);
    // The same card, whatever it is cut into, and none of its slices.
    bytes[1] ^= 0xff;
    DeviceUuid(bytes)
}

/// The UUID of a slice of a card as the tools write it: `MIG-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
#[must_use]
pub fn slice_text(uuid: DeviceUuid) -> String {
    uuid_text(uuid).replacen("GPU-", "MIG-", 1)
}

/// The UUID as the tools write it: `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
#[must_use]
pub fn uuid_text(uuid: DeviceUuid) -> String {
    let mut text = String::from("GPU-");
    for (place, byte) in uuid.0.iter().enumerate() {
        if matches!(place, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn uuids_differ_in_their_first_byte() {
        let first: BTreeSet<u8> = (0..16).map(|index| device_uuid(index).0[0]).collect();
        assert_eq!(first.len(), 16);
    }

    #[test]
    fn text_has_the_tools_form() {
        let text = uuid_text(device_uuid(0));
        assert_eq!(text.len(), 40);
        assert!(text.starts_with("GPU-5e"));
        assert_eq!(text.matches('-').count(), 5);
    }
}
