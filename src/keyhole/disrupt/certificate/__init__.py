"""Proofs that no mask of a few units changes a prediction. certify.py says what is proved."""

from keyhole.disrupt.certificate.certify import SLACK, Certificate, certify, certify_each

__all__ = ["SLACK", "Certificate", "certify", "certify_each"]
