"""python -m consilience"""

from .cli import main

main()
