# SPDX-License-Identifier: Apache-2.0
"""A budget schedule from measured step times and acceptance, kept between starts."""
